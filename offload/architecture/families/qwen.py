"""Qwen2, Qwen2.5 and Qwen3, dense and with a mixture of experts (Qwen3-30B-A3B, Qwen3-Coder)."""

from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values, layer_specs

_DEFAULTS = {"sliding_window": 4096}


def _layers(values: Values) -> list[LayerSpec]:
    return layer_specs(values, qk_norm="head", router="chosen" if values.get("norm_topk_prob") else "all")


QWEN2 = Family(
    "qwen2", lambda values: [LayerSpec(qkv_bias=True)], _DEFAULTS, has_optional_window=True, gguf=GGUFNames("qwen2")
)
QWEN3 = Family(
    "qwen3",
    _layers,
    _DEFAULTS | {"head_dim": 128},
    has_optional_window=True,
    gguf=GGUFNames("qwen3"),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    _layers,
    _DEFAULTS
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}
    | {"decoder_sparse_step": 1, "mlp_only_layers": None},
    aliases={"num_experts": "num_local_experts"},  # in files of transformers 5; others have both names
    has_optional_window=True,
    gguf=GGUFNames("qwen3moe", left_out={"norm_topk_prob": True}),
)
