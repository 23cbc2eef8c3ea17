"""Layers' weights in host memory, brought over the link as the decoder comes to them: for models beyond the device.

The same ring as for keys and values; a layer is one run of bytes, so that it comes in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from ..model import Layer
from .link import Link, Pair
from .memory import allocator
from .staging import Piece, Ring

_ALIGNED = 256  # bytes: what kernels like their operands to begin at


@dataclass(frozen=True)
class WeightTier:
    """The first `resident` layers' weights stay on the device; the others come over `link`."""

    resident: int
    link: Link


class StreamedLayers:
    """All layers in order, once for each `iter`; a layer may be used until the next one is asked for."""

    def __init__(self, near: Sequence[Layer], far: Sequence[Layer], link: Link, device: torch.device) -> None:
        """`far` layers lie in host memory, and are copied from there; the caller keeps none of them."""
        self._near = tuple(near)
        parts = _tensors(far[0])
        offsets, size = [], 0
        for tensor in parts:
            offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        self._far = allocator(device)((len(far), size), torch.uint8)
        for row, layer in zip(self._far, far, strict=True):
            for target, tensor in zip(_views(row, offsets, parts), _tensors(layer), strict=True):
                target.copy_(tensor)
        buffers = torch.empty((2, size), dtype=torch.uint8, device=device).unbind()
        self._slots = {buffer.data_ptr(): _over(far[0], iter(_views(buffer, offsets, parts))) for buffer in buffers}
        self._ring = Ring(link, buffers)
        self._order = [Piece(index, partial(_onto, row)) for index, row in enumerate(self._far)]

    def __len__(self) -> int:
        return len(self._near) + len(self._far)

    def __iter__(self) -> Iterator[Layer]:
        self._ring.expect(self._order)
        done = False
        try:
            yield from self._near
            for piece in self._order:
                buffer = self._ring.take(piece)
                yield self._slots[buffer.data_ptr()]
                self._ring.release(buffer)
            done = True
        finally:  # broken off: a buffer is still out
            if not done:
                self._ring.reset()
        self._ring.expect(self._order)  # of the next pass


def _tensors(layer: Layer) -> list[Tensor]:
    found: list[Tensor] = []
    for field in fields(layer):
        part = getattr(layer, field.name)
        if part is not None:
            found += [part] if isinstance(part, Tensor) else part.tensors()
    return found


def _over(layer: Layer, tensors: Iterator[Tensor]) -> Layer:
    """The same layer in other memory."""
    changes = {}
    for field in fields(layer):
        part = getattr(layer, field.name)
        if isinstance(part, Tensor):
            changes[field.name] = next(tensors)
        elif part is not None:
            changes[field.name] = part.over([next(tensors) for _ in part.tensors()])
    return replace(layer, **changes)


def _views(row: Tensor, offsets: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    return [
        row[offset : offset + each.nbytes].view(each.dtype).view(each.shape)
        for offset, each in zip(offsets, like, strict=True)
    ]


def _onto(row: Tensor, buffer: Tensor) -> list[Pair]:
    return [(buffer, row)]
