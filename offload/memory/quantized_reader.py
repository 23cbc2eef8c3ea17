"""Reads quantised keys and values over tiers outside of a pass, with the native kernel: for selections."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.kv_formats import GROUP, SINK
from .quantized_groups import dequantized, group_items
from .quantized_passes import QuantizedPasses
from .quantized_store import QuantizedStore


class QuantizedTierReader(QuantizedPasses, QuantizedStore):
    """Reads groups from the tier that has them; host memory and disk are read over the link."""

    def _dequantized(self, layer: int, groups: range) -> tuple[Tensor, Tensor]:
        if layer < self.resident_layers:
            return super()._dequantized(layer, groups)
        parts = []
        for page, some, _ in self._pages_of(groups):
            both = self._dequantized_items(layer, page, group_items(self.shape.kv_heads, some, some))
            parts.append([x.view(self.shape.kv_heads, -1, self.shape.head_dim) for x in both])
        keys, values = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        return keys, values

    def _dequantized_items(self, layer: int, page: int, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[items, 32, head_dim]` of groups of a page; items as `dequantize_call` has."""
        if layer < self.resident_layers:
            groups = self._groups.layer(layer)
            items = items + torch.tensor([0, 0, page * self.span // GROUP], dtype=torch.int32)
        else:
            groups = self.tiers.format.groups(self._fetched(layer - self.resident_layers, page).unsqueeze(0))
        return dequantized(self._kernel, groups, items, self.shape.head_dim, self.dtype)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks as in `Store`, of whole groups; each page is fetched once."""
        shape = (len(rows), size // GROUP, GROUP, self.shape.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype) for _ in range(2))
        layers, pages = rows // self.shape.kv_heads, chunks * size // self.span
        in_bf16 = (chunks * size < SINK) | ((chunks + 1) * size > self._oldest)
        each = self.span // GROUP
        for layer, page in torch.stack((layers, pages))[:, ~in_bf16].unique(dim=1).T.tolist():
            at = ((layers == layer) & (pages == page) & ~in_bf16).nonzero().squeeze(1)
            groups = (chunks[at] * size // GROUP % each).unsqueeze(1) + torch.arange(size // GROUP)
            heads = (rows[at] % self.shape.kv_heads).unsqueeze(1).expand_as(groups)
            items = torch.stack((heads, groups, groups), dim=2).flatten(0, 1).to(torch.int32)
            both = self._dequantized_items(layer, page, items)
            keys[at], values[at] = (x.view(len(at), *shape[1:]) for x in both)
        for layer, chunk in torch.stack((layers, chunks))[:, in_bf16].unique(dim=1).T.tolist():
            at = ((layers == layer) & (chunks == chunk)).nonzero().squeeze(1)
            both = self._read(layer, chunk * size, (chunk + 1) * size)
            keys[at], values[at] = (x[rows[at] % self.shape.kv_heads].view(len(at), *shape[1:]) for x in both)
        return keys.flatten(1, 2), values.flatten(1, 2)
