"""Gemma 4, the text part: Gemma 3 with larger heads in the layers without a window, norms of v, and scaled layers.

The small ones (E2B, E4B) have embeddings of each layer's own, and later layers that attend to the keys and values of an
earlier one. In the large ones the layers without a window have no linear for v, which is k before its norm.
"""

from typing import Any

from ...errors import UnsupportedModel
from ..layer_spec import FULL, SLIDING, Heads, LayerSpec, activation_of
from .family import Family, Values, layer_windows
from .gemma import DEFAULTS, GEMMA3, GEMMA_TENSORS, outer_features

_HINT = "use a dense Gemma 4, such as gemma-4-E4B"


def _layers(values: Values) -> list[LayerSpec]:
    _refuse(values)
    bias, layers, borrowing = values["attention_bias"], values["num_hidden_layers"], values["num_kv_shared_layers"]
    sliding, full = (heads.head_dim for heads in _both(values))
    windows = _windows(values)
    own, every = ({window > 0 for window in some} for some in (windows[: max(layers - borrowing, 0)], windows))
    if own != every:
        raise UnsupportedModel("Gemma 4 without a layer of each kind that has keys and values is not supported", _HINT)
    specs = []
    for layer, window in enumerate(windows):
        borrows = layer >= layers - borrowing
        specs.append(
            LayerSpec(
                qkv_bias=bias,
                o_bias=bias,
                qk_norm="head",
                normalises_values=True,
                keys_are_values=values["attention_k_eq_v"] and not window and not borrows,
                borrows=borrows,
                post_norms=True,
                width_factor=2 if borrows and values["use_double_wide_mlp"] else 1,
                has_scale=True,
                activation=activation_of(values["hidden_act"]),
                query_scale=(sliding if window else full) ** 0.5,  # scores are not divided by it
                window=window,
            )
        )
    return specs


def _refuse(values: Values) -> None:
    """Raise UnsupportedModel for variants that the decoder does not compute."""
    if values["enable_moe_block"]:
        raise UnsupportedModel("Gemma 4 with experts beside the MLP is not supported", _HINT)
    if values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModel("Gemma with attention in both directions is not supported", "use a model that generates")
    if values["hidden_size_per_layer_input"] and values["vocab_size_per_layer_input"] != values["vocab_size"]:
        raise UnsupportedModel("Gemma 4 with a smaller vocabulary in its layers (vocab_size_per_layer_input)", _HINT)


def _windows(values: Values) -> list[int]:
    """Return the window of each layer; the last one has none."""
    return [*layer_windows(values, 6)[: values["num_hidden_layers"] - 1], 0]


def _both(values: Values) -> tuple[Heads, Heads]:
    """Return the KV heads of the layers with a window, and of the others.

    Configs have those of the others as `global_head_dim` and `num_global_key_value_heads`, newer ones layer by layer,
    "05" for the sixth.
    """
    sliding = Heads(values["num_key_value_heads"], values["head_dim"])
    if (by_layer := values.get("per_layer_config")) is None:
        kv_heads = values["num_global_key_value_heads"] if values["attention_k_eq_v"] else None
        return sliding, Heads(kv_heads or sliding.kv_heads, values["global_head_dim"])
    by_layer, full = {int(layer): own for layer, own in by_layer.items()}, set()
    for layer, window in enumerate(_windows(values)):
        own = by_layer.get(layer, {})
        heads = Heads(own.get("num_key_value_heads", sliding.kv_heads), own.get("head_dim", sliding.head_dim))
        if not own.keys() <= {"num_key_value_heads", "head_dim"} or (window and heads != sliding):
            raise UnsupportedModel("Gemma 4 with other values in single layers (per_layer_config)", _HINT)
        full |= set() if window else {heads}
    if len(full) > 1:
        raise UnsupportedModel("Gemma 4 with other heads in single layers (per_layer_config)", _HINT)
    return sliding, full.pop()


def _heads(values: Values) -> dict[str, Any]:
    sliding, full = _both(values)
    if values["num_attention_heads"] % full.kv_heads:
        raise UnsupportedModel(f"Gemma 4 whose heads are no multiple of {full.kv_heads} KV heads", _HINT)
    return {"kv_heads": full.kv_heads, "head_dim": full.head_dim, "sliding_heads": sliding}


def _features(values: Values) -> dict[str, Any]:
    return outer_features(values) | {"layer_input": values["hidden_size_per_layer_input"] or 0}


GEMMA4 = Family(
    "gemma4_text",
    _layers,
    DEFAULTS
    | {"vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 131072, "sliding_window": 512}
    | {"global_head_dim": 512, "num_global_key_value_heads": None, "attention_k_eq_v": False}
    | {"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0}
    | {"enable_moe_block": False, "use_double_wide_mlp": False, "final_logit_softcapping": None}
    | {
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    not_null=("head_dim", "num_key_value_heads"),
    aliases=GEMMA3.aliases,
    only_rope=("proportional",),
    has_partial_rope=True,
    has_layer_windows=True,
    heads=_heads,
    features=_features,
    tensors=GEMMA_TENSORS,
)
