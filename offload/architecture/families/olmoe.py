"""OLMoE: a mixture of experts with norms of q and k over all heads."""

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import GGUF_EXPERT_TENSORS, GGUF_EXPERTS, Family, GGUFNames, Values


def _layers(values: Values) -> list[LayerSpec]:
    if values.get("clip_qkv") is not None:
        raise UnsupportedModel("OLMoE with clip_qkv is not supported", "use a model without it")
    bias, router = values["attention_bias"], "chosen" if values["norm_topk_prob"] else "all"
    return [LayerSpec(qkv_bias=bias, o_bias=bias, qk_norm="projection", router=router)]


OLMOE = Family(
    "olmoe",
    _layers,
    {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    gguf=GGUFNames(
        "olmoe",
        {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate"}
        | GGUF_EXPERT_TENSORS,
        GGUF_EXPERTS,
        reads_tokenizer=True,
    ),
)
