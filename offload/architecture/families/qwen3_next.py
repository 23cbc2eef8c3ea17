"""Qwen3-Next and Qwen3.5: linear attention (Gated DeltaNet) in three of four layers, gated attention in the others.

Norms add 1 to their weights, RoPE rotates a part of each head, and experts have one beside them that all tokens have.
Of Qwen3.5 these are the text parts.
"""

from typing import Any

from ..layer_spec import LayerSpec, activation_of
from .family import Family, Values, linear_layers

_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
}
_STACKED = {  # in files of transformers 5
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}


def _layers(values: Values) -> list[LayerSpec]:
    bias, dense = values["attention_bias"], values.get("mlp_only_layers") or ()
    router, every = "chosen" if values.get("norm_topk_prob", True) else "all", values.get("decoder_sparse_step", 1)
    has_experts = values.get("num_experts", 0) > 0

    def spec(layer: int, is_linear: bool) -> LayerSpec:
        is_sparse = has_experts and layer not in dense and (layer + 1) % every == 0
        kind: dict[str, Any] = {"is_linear": True} if is_linear else {"gates_heads": True, "qk_norm": "head"}
        more: dict[str, Any] = {"router": router, "shares_expert": True} if is_sparse else {}
        biases: dict[str, Any] = {} if is_linear else {"qkv_bias": bias, "o_bias": bias}
        return LayerSpec(activation=activation_of(values["hidden_act"]), **kind, **biases, **more)

    return [spec(layer, is_linear) for layer, is_linear in enumerate(linear_layers(values))]


def _features(values: Values) -> dict[str, Any]:
    return {"wide_norms": True, "norm_offset": 1.0}


_COMMON: dict[str, Any] = {
    "layers": _layers,
    "has_partial_rope": True,
    "has_linear_layers": True,
    "features": _features,
}
QWEN3_NEXT = Family(
    "qwen3_next",
    defaults=_DEFAULTS | _EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10},
    groups_linear_rows=True,
    fused={
        "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    },
    stacked=_STACKED,
    **_COMMON,
)
QWEN3_5 = Family("qwen3_5_text", defaults=_DEFAULTS, **_COMMON)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", defaults=_DEFAULTS | _EXPERTS | {"intermediate_size": 512}, stacked=_STACKED, **_COMMON
)
