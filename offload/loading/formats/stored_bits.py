"""How many bits the weights of a checkpoint take in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...architecture.parameters import WeightBits

_PARTS = ("layers", "outer", "experts")


def average_bits(sizes: Mapping[str, Sequence[int]], quantized: Mapping[str, float], itemsize: int) -> WeightBits:
    """Return the average bits of a weight, inside and outside of the layers, and of experts if those have others.

    `sizes` are those of all tensors, `quantized` the bits of those that are; the others take `itemsize` bytes.
    """
    bits, counts = dict.fromkeys(_PARTS, 0.0), dict.fromkeys(_PARTS, 0)
    for name, size in sizes.items():
        if len(size) > 1:
            part = "outer" if not name.startswith("model.layers.") else "experts" if ".experts." in name else "layers"
            counts[part] += prod(size)
            bits[part] += prod(size) * quantized.get(name, 8 * itemsize)
    layers, outer, experts = (bits[part] / max(counts[part], 1) for part in _PARTS)
    return WeightBits(layers, outer, experts if counts["experts"] and experts != layers else None)
