"""OLMo 2 and 3: norms behind attention and MLP, not before, and of q and k over all heads; OLMo 3 has windows.

OLMoE is a mixture of experts with norms of q and k over all heads.
"""

from dataclasses import replace

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import GGUF_EXPERT_TENSORS, GGUF_EXPERTS, GGUF_QK_NORMS, Family, GGUFNames, Values, layer_windows


def _layers(values: Values) -> list[LayerSpec]:
    bias = values["attention_bias"]
    return [LayerSpec(qkv_bias=bias, o_bias=bias, qk_norm="projection", pre_norms=False, post_norms=True)]


OLMO2 = Family(
    "olmo2",
    _layers,
    {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    tensors={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    gguf=GGUFNames(
        "olmo2",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
        | GGUF_QK_NORMS,
    ),
)


_THETA = 500000.0


def _windowed_layers(values: Values) -> list[LayerSpec]:
    (spec,) = OLMO2.layers(values)
    return [replace(spec, window=window) for window in layer_windows(values, 4)]


OLMO3 = Family(
    "olmo3",
    _windowed_layers,
    OLMO2.defaults | {"sliding_window": 4096, "rope_theta": _THETA},
    has_layer_windows=True,
    sliding_rope=lambda values: {"rope_type": "default", "rope_theta": values.get("rope_theta", _THETA)},
    tensors=OLMO2.tensors,
)


def _sparse_layers(values: Values) -> list[LayerSpec]:
    if values.get("clip_qkv") is not None:
        raise UnsupportedModel("OLMoE with clip_qkv is not supported", "use a model without it")
    bias, router = values["attention_bias"], "chosen" if values["norm_topk_prob"] else "all"
    return [LayerSpec(qkv_bias=bias, o_bias=bias, qk_norm="projection", router=router)]


OLMOE = Family(
    "olmoe",
    _sparse_layers,
    {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    gguf=GGUFNames(
        "olmoe",
        GGUF_QK_NORMS | {"ffn_gate_inp": "mlp.gate"} | GGUF_EXPERT_TENSORS,
        GGUF_EXPERTS,
    ),
)
