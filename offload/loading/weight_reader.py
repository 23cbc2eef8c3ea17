"""Reads weights from a checkpoint: a rank's part of them, in the decoder's order, for a device and its kernels."""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..kernels.ops import Linear, LocalLinear, Operations
from ..kernels.quantized import Quantized
from ..parallel import Group, Share
from ..parallel.linear import GatheredLinear, JoinedNorm, SummedLinear, Table
from .formats.checkpoint import Weights
from .formats.layer_tensors import TensorPlace, TensorPlaces


class WeightReader:
    """Copies tensors, or a rank's part of them, from the checkpoint's mapped files to a device, one at a time."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        group: Group,
        share: Share | None,
        shape: ModelShape,
    ) -> None:
        self._weights = weights
        self._operations = operations
        self._dtype = dtype
        self._device = device
        self.group, self._share = group, share
        self._places, self._shape = TensorPlaces(shape), shape

    def stacked(self, *names: str) -> Tensor:
        """Return the tensors concatenated along their rows, in newly allocated memory."""
        parts = [self._tensor(name) for name in names]
        rows = sum(len(part) for part in parts)
        whole = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        for target, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
            target.copy_(part)
        return whole

    def norm(self, name: str) -> Tensor:
        """Return the bias of a norm, or its weight with what the family adds to it."""
        found = self.wide(name) if self._shape.wide_norms else self.stacked(name)
        return found if name.endswith(".bias") else found + self._shape.norm_offset

    def wide(self, name: str) -> Tensor:
        """Return a tensor in fp32."""
        return self._tensor(name).to(self._device, torch.float32)

    def joined_norm(self, q: str, k: str) -> JoinedNorm:
        """Return norms of q and k over the heads of all ranks, from this rank's parts of their weights."""
        shape = self._shape
        widths = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        assert self._share is not None
        return JoinedNorm((self.norm(q), self.norm(k)), widths, self._share.counts_keys, self.group)

    def ones(self, size: int) -> Tensor:
        """Return the weight of a norm without one, in fp32."""
        return torch.ones(size, device=self._device)

    def _tensor(self, name: str) -> Tensor:
        """Return a tensor, or this rank's part of it, in the decoder's order of rows."""
        place = self._place(name)
        tensor = self._weights[place.name].read(place.part)
        return tensor if place.order is None else tensor[torch.tensor(place.order)]

    def _place(self, name: str) -> TensorPlace:
        """Return where the checkpoint has a tensor, or this rank's part of it."""
        return self._places.find(name, None if self._share is None else self._share.part(name))

    def linear(self, bias: bool, *names: str) -> LocalLinear:
        """Return the named linears as one, with their rows concatenated; quantised if they can be."""
        biases = self.stacked(*(f"{name}.bias" for name in names)) if bias else None
        read = cache(self._read_quantized)  # q, k and v may be one stored tensor, which may have to be rounded
        parts = [self._quantized(f"{name}.weight", read) for name in names]
        if any(part is not None for part in parts):
            pairs = zip(parts, names, strict=True)
            weights = [self.stacked(f"{name}.weight") if part is None else part for part, name in pairs]
            return self._operations.quantized_linear(weights, biases)
        return self._operations.linear(self.stacked(*(f"{name}.weight" for name in names)), biases)

    def linear_of(self, weight: Tensor) -> LocalLinear:
        """Return a linear with a weight `[out, in]` that was read."""
        return self._operations.linear(weight)

    def table(self, name: str) -> Table | Linear:
        part = self._quantized(f"{name}.weight", self._read_quantized)
        return Table(self.stacked(f"{name}.weight")) if part is None else self._operations.quantized_linear([part])

    def _read_quantized(self, stored: str) -> Quantized | None:
        return self._weights[stored].quantized()

    def _quantized(self, name: str, read: Callable[[str], Quantized | None]) -> Quantized | None:
        """Return a weight, or this rank's part of it, as it is stored; None if it has to be dequantised."""
        place = self._place(name)
        if not self._operations.serves_quantized(self._dtype) or (whole := read(place.name)) is None:
            return None
        rows, *columns = place.part or (slice(None),)
        part = whole.rows(rows) if not columns else whole.rows(rows).columns(*columns)
        if part is not None and place.order is not None:
            part = part.rows(torch.tensor(place.order))
        return None if part is None else part.to(self._device)

    def summed(self, bias: bool, name: str) -> Linear:
        """Return a linear split by columns among the ranks; its bias is added once."""
        if self._share is None:
            return self.linear(bias, name)
        return SummedLinear(self.linear(bias and self.group.rank == 0, name), self.group)

    def gathered(self, table: Linear) -> Linear:
        """Return a table over the vocabulary, which may be split by rows among the ranks."""
        if self._share is None or not self._share.splits_vocab:
            return table
        return GatheredLinear(table, self.group, self._share.vocab)

    def embedding(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return the function from ids to the rows of an embedding that is not the output head too."""
        return self.gathered(cast("Linear", self.table(name))).rows  # nothing else of it is used
