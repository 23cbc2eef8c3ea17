"""Memory of quantised keys and values, group by group, for a store and for what reads it by a block table."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, group_bytes
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, dequantize_call, kv_format, quantize_call
from .host_tensors import host_memory

GROUP_BLOCKS = GROUP // BLOCK


class QuantizedGroups:
    """Quantised groups of up to `capacity` tokens of the first `layers` layers, or of all, in host memory.

    Group g has tokens from 32 g on.
    """

    def __init__(self, kernel: Kernel, shape: ModelShape, capacity: int, kind: str, layers: int | None = None) -> None:
        self._kernel, self._shape, self.kind = kernel, shape, kind
        layers = shape.layers if layers is None else layers
        size = (layers, shape.kv_heads, -(-capacity // GROUP), group_bytes(kind, shape.head_dim))
        self.memory = host_memory(size, torch.uint8)
        self._layers = [Groups(layer, kv_format(kind)) for layer in self.memory.unbind()]

    def layer(self, layer: int) -> Groups:
        """Return a layer's groups, as the kernel's calls take them."""
        return self._layers[layer]

    def quantize(self, layer: int, blocks: Tensor, items: Tensor) -> None:
        """Quantise groups of a layer's blocks `[kv_heads, blocks, 2 * 16 * head_dim]`; items as `quantize_call` has."""
        self._kernel.quantize(quantize_call(blocks, self._layers[layer], items, self._shape.head_dim))

    def dequantize(self, layer: int, groups: Iterable[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values `[kv_heads, tokens, head_dim]` of groups, bf16 or fp32."""
        groups, heads = list(groups), self._shape.kv_heads
        items = group_items(heads, groups, [0] * len(groups))
        both = dequantized(self._kernel, self._layers[layer], items, self._shape.head_dim, dtype)
        keys, values = (x.view(heads, -1, self._shape.head_dim) for x in both)
        return keys, values


def dequantized(
    kernel: Kernel, groups: Groups, items: Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values `[items, 32, head_dim]`, bf16 or fp32, of groups; items as `dequantize_call` has."""
    keys, values = (torch.empty((len(items), GROUP, head_dim), dtype=dtype) for _ in range(2))
    kernel.quantize(dequantize_call(groups, items, keys, values))
    return keys, values


def group_items(kv_heads: int, groups: Iterable[int], blocks: Iterable[int]) -> Tensor:
    """Return items, as of `quantize_call`, for the same groups of all heads; `blocks` are their first blocks."""
    pairs = list(zip(blocks, groups, strict=True))
    return torch.tensor([(head, *pair) for head in range(kv_heads) for pair in pairs], dtype=torch.int32).view(-1, 3)
