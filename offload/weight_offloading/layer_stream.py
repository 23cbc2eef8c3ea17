"""Layer weights in host memory, prefetched over the link in the decoder's order, for models larger than the device.

They use the same ring as keys and values. A layer is one contiguous run of bytes, so it is one copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModel
from ..memory.host_memory import allocator
from ..memory.link import LINK_COST, Link
from ..memory.prefetch import PrefetchItem, PrefetchRing
from ..model.layer import Layer
from .experts import ExpertTier
from .packed_rows import copy_into, row_bytes, sizes_of, views


@dataclass(frozen=True)
class WeightTier:
    """The first `resident` layers' weights stay on the device; the others are streamed over `link`.

    With `experts`, which goes with all layers resident, some layers' experts are nevertheless in host memory.
    """

    resident: int
    link: Link
    experts: ExpertTier | None = None


class StreamedLayers:
    """All layers of a model, in order; a layer is valid until the iterator is advanced."""

    def __init__(self, resident: Sequence[Layer], streamed: Sequence[Layer], link: Link, device: torch.device) -> None:
        """Copy the `streamed` layers to pinned host memory; the caller should drop its references to them."""
        self._resident = tuple(resident)
        if any(layer.delta or layer.latent for layer in streamed):  # rollbacks need a delta's between passes
            raise UnsupportedModel(
                "weights of layers with linear or latent attention cannot be streamed",
                "use --quantize, or a smaller model",
            )
        parts = _tensors(streamed[0])
        if any(sizes_of(_tensors(layer)) != sizes_of(parts) for layer in streamed):
            raise UnsupportedModel(
                "weights whose layers differ, such as in how many bits they have, cannot be streamed",
                "use a smaller model, or one whose layers are alike",
            )
        size = row_bytes(parts)
        self._streamed = allocator(device)((len(streamed), size), torch.uint8)
        for row, layer in zip(self._streamed, streamed, strict=True):
            copy_into(row, _tensors(layer))
        buffers = torch.empty((2, size), dtype=torch.uint8, device=device).unbind()
        # Each layer's own linears: layers of equal sizes may be in different formats.
        self._over = {
            (buffer.data_ptr(), index): _rebuilt(layer, iter(views(buffer, parts)))
            for buffer in buffers
            for index, layer in enumerate(streamed)
        }
        self._ring = PrefetchRing(link, buffers)
        self._owner: object | None = None  # the iteration that the ring prefetches for
        self._order = [PrefetchItem(index, row) for index, row in enumerate(self._streamed)]

    @property
    def read_cost(self) -> float:
        """Return the bytes that a pass reads; those over the link count as much more as it is slower."""
        return sum(layer.linear_bytes() for layer in self._resident) + LINK_COST * self._streamed.nbytes

    def __len__(self) -> int:
        return len(self._resident) + len(self._streamed)

    def __iter__(self) -> Iterator[Layer]:
        """Iterate over all layers. Iterations may be interleaved between layers, but not across threads."""
        iteration = object()
        self._acquire(iteration, 0)
        try:
            yield from self._resident
            for index, item in enumerate(self._order):
                self._acquire(iteration, index)
                buffer = self._ring.take(item)
                yield self._over[buffer.data_ptr(), index]
                if self._owner is iteration:
                    self._ring.release(buffer)
        except BaseException:
            self._release(iteration)
            raise
        if self._owner is iteration:
            self._owner = None
            self._ring.expect(self._order)  # for the next pass

    def _acquire(self, iteration: object, index: int) -> None:
        """Make the ring prefetch for an iteration, from layer `index` of the streamed layers on."""
        if self._owner is not iteration:
            self._release(self._owner)  # a paused iteration needs no buffer
            self._owner = iteration
            self._ring.expect(self._order[index:])

    def _release(self, iteration: object | None) -> None:
        if iteration is not None and self._owner is iteration:
            self._ring.reset()  # it may still have a buffer
            self._owner = None


def _tensors(layer: Layer) -> list[Tensor]:
    tensors: list[Tensor] = []
    for field in fields(layer):
        part = getattr(layer, field.name)
        if part is not None:
            tensors += [part] if isinstance(part, Tensor) else part.tensors()
    return tensors


def _rebuilt(layer: Layer, tensors: Iterator[Tensor]) -> Layer:
    """Return the same layer with its tensors replaced, in the order of `_tensors`."""
    changes: dict[str, Any] = {}
    for field in fields(layer):
        part = getattr(layer, field.name)
        if isinstance(part, Tensor):
            changes[field.name] = next(tensors)
        elif part is not None:
            changes[field.name] = part.over([next(tensors) for _ in part.tensors()])
    return replace(layer, **changes)
