"""OLMo 2 and 3: norms behind attention and MLP, not before, and of q and k over all heads; OLMo 3 has windows.

OLMoE is a mixture of experts with norms of q and k over all heads. EXAONE 4 has norms of each head of q and k, and in
large models windows, and RoPE in their layers alone.
"""

from dataclasses import replace

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values, layer_specs

_NORMS = {"pre_norms": False, "post_norms": True}
_THETA = 500000.0
OLMO2 = Family(
    "olmo2",
    lambda values: layer_specs(values, qk_norm="projection", **_NORMS),
    {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    tensors={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    gguf=GGUFNames("olmo2"),
)
OLMO3 = Family(
    "olmo3",
    lambda values: layer_specs(values, 4, qk_norm="projection", **_NORMS),
    OLMO2.defaults | {"sliding_window": 4096, "rope_theta": _THETA},
    has_layer_windows=True,
    sliding_rope=lambda values: {"rope_type": "default", "rope_theta": values.get("rope_theta", _THETA)},
    tensors=OLMO2.tensors,
)


def _exaone4(values: Values) -> list[LayerSpec]:
    every = values["sliding_window"] and (values.get("layer_pattern") or 4)
    specs = layer_specs(values, every, qk_norm="head", **_NORMS)
    return [replace(spec, rotates=spec.window > 0 or not every) for spec in specs]


EXAONE4 = Family(
    "exaone4",
    _exaone4,
    {"rms_norm_eps": 1e-5, "eos_token_id": 2, "sliding_window": 4096, "max_position_embeddings": 2048},
    aliases={"layer_pattern": "sliding_window_pattern"},  # a number, or such as LLLG
    has_layer_windows=True,
    tensors=OLMO2.tensors,
    gguf=GGUFNames("exaone4", {"layer_pattern": "attention.sliding_window_pattern"}, left_out={"sliding_window": None}),
)


def _sparse_layers(values: Values) -> list[LayerSpec]:
    if values.get("clip_qkv") is not None:
        raise UnsupportedModel("OLMoE with clip_qkv is not supported", "use a model without it")
    return layer_specs(values, qk_norm="projection", router="chosen" if values["norm_topk_prob"] else "all")


OLMOE = Family(
    "olmoe",
    _sparse_layers,
    {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    gguf=GGUFNames("olmoe"),
)
