"""Mistral, Mistral-Nemo and Ministral, whose layers may have windows, or scale queries by position; and Mixtral."""

from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values, layer_windows

MISTRAL = Family(
    "mistral",
    lambda values: [LayerSpec(qkv_bias=values["attention_bias"])],
    {"sliding_window": 4096, "eos_token_id": 2},
)


def _windowed_layers(values: Values) -> list[LayerSpec]:
    return [LayerSpec(window=window) for window in layer_windows(values, values["num_hidden_layers"] + 1)]


_YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL = Family("ministral", _windowed_layers, MISTRAL.defaults, has_layer_windows=True)
MINISTRAL3 = Family(
    "ministral3",
    MISTRAL.layers,
    {"head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2, "rope_parameters": _YARN},
    scales_queries=True,
)
MIXTRAL = Family(
    "mixtral",
    lambda values: [LayerSpec(router="chosen")],
    {"rms_norm_eps": 1e-5, "eos_token_id": 2, "rope_theta": 1000000.0, "num_experts": 8, "num_experts_per_tok": 2},
    aliases={"num_experts": "num_local_experts"},
    tensors={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
        "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
        "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
    },
    gguf=GGUFNames("llama", {"sliding_window": "attention.sliding_window"}, permutes=True),
)
