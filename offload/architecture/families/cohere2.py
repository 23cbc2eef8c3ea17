"""Command-R7B and Command-A: Command-R with layers that attend to a window, and no RoPE in the others."""

from dataclasses import replace

from ..layer_spec import LayerSpec
from .cohere import COHERE
from .family import Family, GGUFNames, Values, layer_windows


def _layers(values: Values) -> list[LayerSpec]:
    every = values.get("sliding_window_pattern") or 4
    (spec,) = COHERE.layers(values)
    return [replace(spec, window=window, rotates=window > 0) for window in layer_windows(values, every)]


COHERE2 = Family(
    "cohere2",
    _layers,
    dict(COHERE.defaults) | {"sliding_window": 4096, "rope_theta": 10000.0},
    aliases=COHERE.aliases,
    has_layer_windows=True,
    features=COHERE.features,
    gguf=GGUFNames(
        "cohere2",
        keys={**COHERE.gguf.keys, "sliding_window": "attention.sliding_window"},
        reads_tokenizer=True,
    ),
)
