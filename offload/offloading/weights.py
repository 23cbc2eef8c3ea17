"""Layers' weights in host memory, brought over the link as the decoder comes to them: for models beyond the device.

The same ring as for keys and values; a layer is one run of bytes, so that it comes in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from ..decoder import Layer
from .host_memory import allocator
from .link import Link, Pair
from .prefetch import PrefetchItem, PrefetchRing

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
        self._ring = PrefetchRing(link, buffers)
        self._leader: object | None = None  # for whom the ring works
        self._order = [PrefetchItem(index, partial(_onto, row)) for index, row in enumerate(self._far)]

    def __len__(self) -> int:
        return len(self._near) + len(self._far)

    def __iter__(self) -> Iterator[Layer]:
        """Several may be under way, one going on while the others rest between two layers; not in several threads."""
        me = object()
        self._lead(me, 0)
        try:
            yield from self._near
            for index, item in enumerate(self._order):
                self._lead(me, index)
                buffer = self._ring.take(item)
                yield self._slots[buffer.data_ptr()]
                if self._leader is me:
                    self._ring.release(buffer)
        except BaseException:
            self._stop(me)
            raise
        if self._leader is me:
            self._leader = None
            self._ring.expect(self._order)  # of the next pass

    def _lead(self, who: object, index: int) -> None:
        """The ring works for `who` from now on, who goes on with the layer of that index."""
        if self._leader is not who:
            self._stop(self._leader)  # whoever rests has no use for a layer
            self._leader = who
            self._ring.expect(self._order[index:])

    def _stop(self, who: object | None) -> None:
        if who is not None and self._leader is who:
            self._ring.reset()  # a buffer of his may be out
            self._leader = None


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
