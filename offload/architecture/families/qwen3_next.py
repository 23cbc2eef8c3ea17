"""Qwen3-Next and Qwen3.5: linear attention (Gated DeltaNet) in three of four layers, gated attention in the others.

Norms add 1 to their weights, RoPE rotates a part of each head, and experts have one beside them that all tokens have.
Of Qwen3.5 these are the text parts.
"""

from dataclasses import replace
from typing import Any

from ..layer_spec import LayerSpec, activation_of
from .family import STACKED_EXPERTS, Family, Values, layer_specs, linear_layers

_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
_DEFAULTS |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_DEFAULTS |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": None}
_EXPERTS |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1}


def _layers(values: Values) -> list[LayerSpec]:
    router = "chosen" if values.get("norm_topk_prob", True) else "all"
    features = {"activation": activation_of(values["hidden_act"]), "router": router, "shares_expert": True}
    every, layers = layer_specs(values, gates_heads=True, qk_norm="head", **features), linear_layers(values)
    plain: dict[str, Any] = {"gates_heads": False, "qk_norm": "", "qkv_bias": False, "o_bias": False}
    specs = [every[layer % len(every)] for layer in range(len(layers))]
    return [replace(spec, is_linear=True, **plain) if own else spec for spec, own in zip(specs, layers, strict=True)]


_COMMON: dict[str, Any] = {"layers": _layers, "has_partial_rope": True, "has_linear_layers": True}
_COMMON["features"] = lambda values: {"wide_norms": True, "norm_offset": 1.0}
QWEN3_NEXT = Family(
    "qwen3_next",
    defaults=_DEFAULTS | _EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10},
    groups_linear_rows=True,
    fused={
        "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    },
    stacked=STACKED_EXPERTS,
    **_COMMON,
)
QWEN3_5 = Family("qwen3_5_text", defaults=_DEFAULTS, **_COMMON)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", defaults=_DEFAULTS | _EXPERTS | {"intermediate_size": 512}, stacked=STACKED_EXPERTS, **_COMMON
)
