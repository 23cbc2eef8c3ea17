"""Experts in pinned host memory, of which a pass copies those to the device that its tokens are routed to.

A pass over so many tokens that nearly all are chosen copies all of them, and reads ahead into the next layer.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture.layer_spec import expected_experts, reads_all
from ..errors import UnsupportedModel
from ..events import ExpertsRun
from ..kernels.ops import LocalLinear
from ..memory.host_memory import allocator
from ..memory.link import LINK_COST, Link, Pair
from ..memory.prefetch import PrefetchRing
from ..model.experts import ExpertWeights, grouped, weighted_sum

STAGED_LAYERS = 2  # layers' experts for which the device has room: those of one run while the next are copied
_ALIGNMENT = 256  # bytes, of each tensor
Expert = tuple[LocalLinear, LocalLinear]  # gate and up, down
Arrange = Callable[[Expert], Expert]


@dataclass(slots=True)
class ExpertStatistics:
    """Counts of the experts of `layers` layers in host memory.

    `passes` counts each layer of each pass, `experts` those that ran in them, `bytes` those that were read on the host
    or copied to the device, and `seconds` the host's time, 0 where the device runs them.
    """

    way: str
    layers: int = 0
    passes: int = 0
    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def event(self) -> ExpertsRun:
        return ExpertsRun(self.way, self.layers, self.passes, self.experts, self.bytes, self.seconds)


class _Item(NamedTuple):
    """A copy of one expert to a buffer, which may be larger."""

    key: tuple[int, int]  # layer and expert
    source: Tensor
    pages: None = None  # it is one copy

    def copies(self, buffer: Tensor) -> list[Pair]:
        return [(buffer[: len(self.source)], self.source)]


@dataclass(frozen=True)
class _Stored:
    """The experts of a layer: rows of bytes `[experts, size]`, and an expert over the first of them.

    `arranged` is an expert as it lies in the device's buffers, or None if it lies there as in `rows`.
    """

    rows: Tensor
    first: Expert
    arranged: Expert | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what two layers must have in common for the same linears to be over their bytes."""
        return _kind(self.first)


class ExpertStream:
    """The experts of several layers in host memory, and the device's buffers for them, which all layers share.

    What has been copied of a layer stays in its buffers until another layer runs: when a prompt is read layer by layer,
    its chunks find it there. Like the layers of a model, it is used by one thread.
    """

    def __init__(
        self, link: Link, device: torch.device, statistics: ExpertStatistics, arrange: Arrange | None = None
    ) -> None:
        """Create a stream without layers; `arrange` returns an expert in the layout that the device computes with."""
        self._link, self._device, self.statistics, self._arrange = link, device, statistics, arrange
        self._layers: list[_Stored] = []
        self._over: dict[tuple[int, Any], Expert] = {}  # by buffer and kind of layer
        self._copied: dict[tuple[int, Any], Expert] = {}  # likewise, as they arrive, if they are then arranged
        self._ring: PrefetchRing | None = None
        self._layer: int | None = None  # whose experts are held
        self._held: dict[int, Tensor] = {}  # buffers, by expert
        self._coming: deque[int] = deque()  # experts of the layer, in the order in which they arrive

    def add(self, experts: ExpertWeights) -> StreamedExperts:
        """Copy the experts of the next layer to pinned memory; the caller should drop them.

        Raises UnsupportedModel if they are not alike.
        """
        pairs = list(zip(experts.gate_up, experts.down, strict=True))
        if any(_kind(pair) != _kind(pairs[0]) for pair in pairs):
            raise UnsupportedModel(
                "experts that differ, such as in how many bits they have, cannot be copied one by one",
                "use --experts host or device",
            )
        size = -(-_size(pairs[0]) // mmap.PAGESIZE) * mmap.PAGESIZE  # rows can be pinned one by one
        rows = allocator(self._device)((len(pairs), size), torch.uint8)
        for row, pair in zip(rows, pairs, strict=True):
            for target, tensor in zip(_views(row, pair), _tensors(pair), strict=True):
                target.copy_(tensor)
        first = _over(pairs[0], rows[0])
        self._layers.append(_Stored(rows, first, self._arrange and self._arrange(first)))
        return StreamedExperts(self, len(self._layers) - 1, len(pairs), experts.per_token)

    def allocate(self) -> None:
        """Allocate the buffers, once all layers are added."""
        if not self._layers:
            return
        count = max(len(stored.rows) for stored in self._layers)
        size = max(max(stored.rows.shape[1], _size(stored.arranged or stored.first)) for stored in self._layers)
        buffers = torch.empty((STAGED_LAYERS * count, size), dtype=torch.uint8, device=self._device).unbind()
        kinds = {stored.kind: stored for stored in self._layers}
        for buffer, (kind, stored) in product(buffers, kinds.items()):
            self._over[buffer.data_ptr(), kind] = _over(stored.arranged or stored.first, buffer)
            if stored.arranged is not None:
                self._copied[buffer.data_ptr(), kind] = _over(stored.first, buffer)
        self._ring = PrefetchRing(self._link, buffers)

    def in_memory(self, layer: int) -> list[Expert]:
        """Return the experts of a layer over the host memory from which they are copied."""
        stored = self._layers[layer]
        return [_over(stored.first, row) for row in stored.rows]

    def expert_bytes(self, layer: int) -> int:
        return self._layers[layer].rows.shape[1]

    def begin(self, layer: int, chosen: list[int], whole: bool) -> None:
        """Begin to copy the chosen experts of a layer that are not held; of a `whole` one all, and the next layer's."""
        if layer != self._layer:
            self._release()
            self._layer = layer
        numbers = range(len(self._layers[layer].rows)) if whole else chosen
        self._coming = deque(number for number in numbers if number not in self._held)
        if self._coming:
            self._ring.expect(self._items(layer, whole))
        self.statistics.passes += 1
        self.statistics.experts += len(chosen)
        self.statistics.bytes += len(self._coming) * self.expert_bytes(layer)

    def _items(self, layer: int, whole: bool) -> Iterator[_Item]:
        ahead = self._layers[layer + 1 : layer + 2] if whole else []
        yield from (_Item((layer, number), self._layers[layer].rows[number]) for number in tuple(self._coming))
        for stored in ahead:
            yield from (_Item((layer + 1, number), row) for number, row in enumerate(stored.rows))

    def expert(self, number: int) -> Expert:
        """Return one of the layer's experts once it has arrived. Raises TransferFailed."""
        while number not in self._held:
            self._take_next()
        stored = self._layers[self._layer]
        return self._over[self._held[number].data_ptr(), stored.kind]

    def end(self) -> None:
        """Take what has not been asked for of a layer that is copied as a whole, so that the next one follows."""
        while self._coming:
            self._take_next()

    def _take_next(self) -> None:
        number = self._coming[0]
        stored = self._layers[self._layer]
        buffer = self._held[number] = self._ring.take(_Item((self._layer, number), stored.rows[number]))
        self._coming.popleft()
        if self._arrange is not None:
            key = buffer.data_ptr(), stored.kind
            arranged = _tensors(self._arrange(self._copied[key]))  # all of it, before it replaces what it is made of
            for target, tensor in zip(_tensors(self._over[key]), arranged, strict=True):
                target.copy_(tensor)

    def abort(self) -> None:
        """Make every buffer free again after a pass that was interrupted."""
        self._held.clear()
        self._coming.clear()
        self._layer = None
        self._ring.reset()

    def _release(self) -> None:
        for number in list(self._held):
            self._ring.release(self._held.pop(number))


class _Arriving(Mapping[int, LocalLinear]):
    """One linear of each of the experts that are on their way, by number."""

    def __init__(self, stream: ExpertStream, part: int) -> None:
        self._stream, self._part = stream, part

    def __getitem__(self, number: int) -> LocalLinear:
        return self._stream.expert(number)[self._part]

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class StreamedExperts:
    """The experts of one layer of a stream; see `ExpertsAway`."""

    stream: ExpertStream
    layer: int
    count: int
    per_token: int

    def weighted_sum(
        self, x: Tensor, weights: Tensor, experts: Tensor, activated: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Run the experts as `ExpertsAway` says; each runs as soon as it has arrived."""
        stream, groups = self.stream, grouped(experts)
        try:
            is_whole = reads_all(self.count, self.per_token, len(x))
            stream.begin(self.layer, [number for number, _ in groups[0]], is_whole)
            total = weighted_sum(_Arriving(stream, 0), _Arriving(stream, 1), x, weights, groups, activated)
            stream.end()
        except BaseException:
            stream.abort()
            raise
        return total

    def read_cost(self, tokens: int) -> float:
        return LINK_COST * expected_experts(self.count, self.per_token, tokens) * self.stream.expert_bytes(self.layer)


def _tensors(expert: Expert) -> list[Tensor]:
    return [tensor for linear in expert for tensor in linear.tensors()]


def _size(expert: Expert) -> int:
    """Return the bytes of a row or buffer with the expert."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in _tensors(expert))


def _kind(expert: Expert) -> tuple[Any, ...]:
    sizes = tuple((tensor.dtype, tensor.shape) for tensor in _tensors(expert))
    return sizes, tuple(linear.formats for linear in expert)


def _views(row: Tensor, like: Expert) -> list[Tensor]:
    """Return tensors of an expert's sizes over a row of bytes."""
    tensors = _tensors(like)
    starts = accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors), initial=0)
    return [
        row[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]


def _over(expert: Expert, row: Tensor) -> Expert:
    views = iter(_views(row, expert))
    gate_up, down = (linear.over([next(views) for _ in linear.tensors()]) for linear in expert)
    return gate_up, down
