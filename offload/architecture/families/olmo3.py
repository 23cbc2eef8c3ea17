"""OLMo 3: OLMo 2 with layers that attend to a window, and plain RoPE in those."""

from dataclasses import replace

from ..layer_spec import LayerSpec
from .family import Family, Values, layer_windows
from .olmo2 import OLMO2

_THETA = 500000.0


def _layers(values: Values) -> list[LayerSpec]:
    (spec,) = OLMO2.layers(values)
    return [replace(spec, window=window) for window in layer_windows(values, 4)]


OLMO3 = Family(
    "olmo3",
    _layers,
    OLMO2.defaults | {"sliding_window": 4096, "rope_theta": _THETA},
    has_layer_windows=True,
    sliding_rope=lambda values: {"rope_type": "default", "rope_theta": values.get("rope_theta", _THETA)},
    tensors=OLMO2.tensors,
)
