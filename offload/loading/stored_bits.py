"""How many bits the weights of a checkpoint take in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..architecture.dims import WeightBits


def average_bits(sizes: Mapping[str, Sequence[int]], quantized: Mapping[str, float], itemsize: int) -> WeightBits:
    """Return the average bits of a weight, inside and outside of the layers.

    `sizes` are those of all tensors, `quantized` the bits of those that are; the others take `itemsize` bytes.
    """
    bits, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}  # of tensors in layers, and of others
    for name, size in sizes.items():
        if len(size) > 1:
            in_layer = name.startswith("model.layers.")
            counts[in_layer] += prod(size)
            bits[in_layer] += prod(size) * quantized.get(name, 8 * itemsize)
    return WeightBits(*(bits[part] / max(counts[part], 1) for part in (True, False)))
