"""Mixtral: Mistral with a mixture of experts."""

from ..layer_spec import LayerSpec
from .family import GGUF_EXPERTS, Family, GGUFNames

MIXTRAL = Family(
    "mixtral",
    lambda values: [LayerSpec(router="chosen")],
    {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "rope_theta": 1000000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_experts": "num_local_experts"},
    tensors={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
        "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
        "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
    },
    gguf=GGUFNames(
        "llama",
        {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
            "ffn_up_exps": "block_sparse_moe.experts.*.w3",
            "ffn_down_exps": "block_sparse_moe.experts.*.w2",
        },
        GGUF_EXPERTS | {"sliding_window": "attention.sliding_window"},
        permutes=True,
    ),
)
