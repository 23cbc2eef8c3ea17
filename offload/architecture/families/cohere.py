"""Command-R and Command-R7B: attention and MLP side by side behind one LayerNorm without bias, and scaled logits.

RoPE rotates neighbours; Command-R7B has windows, and RoPE in their layers alone.
"""

from dataclasses import replace

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values, layer_windows


def _layers(values: Values) -> list[LayerSpec]:
    if values.get("use_qk_norm"):
        raise UnsupportedModel("Command-R+ with norms of q and k is not supported", "use Command-R without them")
    bias = values["attention_bias"]
    return [LayerSpec(qkv_bias=bias, o_bias=bias, norm="layer", is_parallel=True)]


_KEYS = {"rms_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
COHERE = Family(
    "cohere",
    _layers,
    {
        "logit_scale": 0.0625,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 255001,
        "rope_theta": 500000.0,
    },
    aliases={"rms_norm_eps": "layer_norm_eps"},
    features=lambda values: {"logit_scale": values["logit_scale"], "rotates_neighbours": True},
    gguf=GGUFNames(
        "command-r",
        keys=_KEYS,
    ),
)


def _windowed_layers(values: Values) -> list[LayerSpec]:
    every = values.get("sliding_window_pattern") or 4
    (spec,) = COHERE.layers(values)
    return [replace(spec, window=window, rotates=window > 0) for window in layer_windows(values, every)]


COHERE2 = Family(
    "cohere2",
    _windowed_layers,
    dict(COHERE.defaults) | {"sliding_window": 4096, "rope_theta": 10000.0},
    aliases=COHERE.aliases,
    has_layer_windows=True,
    features=COHERE.features,
    gguf=GGUFNames("cohere2", keys={**_KEYS, "sliding_window": "attention.sliding_window"}),
)
