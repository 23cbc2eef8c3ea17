"""Gemma 2 and 3: norms before and behind attention and MLP, GELU gates, layers with a window between those without.

Gemma 2 caps attention scores and logits; Gemma 3 has norms of q and k, and other RoPE in layers with a window. The
norms of a checkpoint add 1 to their weights, which GGUF files already contain.
"""

from dataclasses import replace
from typing import Any

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec, activation_of
from .family import Family, GGUFNames, Values, layer_specs

_LARGEST = (46, 62)  # layers of the models with 27 billion parameters, whose scale GGUF files do not have
GEMMA_TENSORS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
DEFAULTS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304}
DEFAULTS |= {"intermediate_size": 9216, "hidden_act": "gelu_pytorch_tanh", "eos_token_id": 1}
DEFAULTS |= {"tie_word_embeddings": True, "sliding_window": 4096}
_DEFAULTS = DEFAULTS | {"num_hidden_layers": 26, "query_pre_attn_scalar": 256}


def _layers(values: Values, every: int, qk_norm: str) -> list[LayerSpec]:
    if values.get("use_bidirectional_attention"):
        raise UnsupportedModel("Gemma with attention in both directions is not supported", "use a model that generates")
    head_dim, scalar = values["head_dim"], values["query_pre_attn_scalar"]
    if scalar is None:
        is_largest = values["num_hidden_layers"] in _LARGEST
        scalar = values["hidden_size"] / values["num_attention_heads"] if is_largest else head_dim
    return layer_specs(
        values,
        every,
        qk_norm=qk_norm,
        post_norms=True,
        activation=activation_of(values["hidden_act"]),
        query_scale=(head_dim / scalar) ** 0.5,
        soft_cap=values["attn_logit_softcapping"] or 0.0,
    )


def outer_features(values: Values) -> dict[str, Any]:
    """Return the features of a Gemma's embeddings, norms and logits."""
    return {
        "embedding_scale": values["hidden_size"] ** 0.5,
        "rounds_embedding_scale": True,
        "logit_cap": values["final_logit_softcapping"] or 0.0,
        "wide_norms": True,
    }


def _features(values: Values) -> dict[str, Any]:
    return outer_features(values) | {"norm_offset": 1.0}


_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_WINDOWS = {
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_LEFT_OUT = {"query_pre_attn_scalar": None}
_SIZES: dict[str, Any] = {"vocab_size": 256000, "max_position_embeddings": 8192}
GEMMA2 = Family(
    "gemma2",
    lambda values: _layers(values, 2, ""),
    _DEFAULTS | _SIZES | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    not_null=("head_dim",),
    aliases={"hidden_act": "hidden_activation"},
    has_layer_windows=True,
    features=_features,
    tensors=GEMMA_TENSORS,
    gguf=GGUFNames("gemma2", _CAPS, left_out=_LEFT_OUT, adds_norm_offset=True),
)
_SIZES = {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0}
GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    layers=lambda values: _layers(values, values.get("sliding_window_pattern") or 6, "head"),
    defaults=_DEFAULTS | _SIZES | dict.fromkeys(_CAPS),
    sliding_rope=lambda values: {"rope_type": "default", "rope_theta": values.get("rope_local_base_freq", 10000.0)},
    counts_scaled_positions=True,
    gguf=GGUFNames("gemma3", _WINDOWS, left_out=_LEFT_OUT, adds_norm_offset=True),
)
