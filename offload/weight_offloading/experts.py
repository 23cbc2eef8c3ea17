"""Experts of a mixture in host memory: run there by passes of a few rows, copied to the device by passes of many.

A step reads a few experts, and host memory gives their bytes faster than the link. A prompt reads nearly all of them:
whole layers are copied, the next one while one runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..architecture.layer_spec import expected_experts
from ..errors import UnsupportedModel
from ..events import ExpertsRun
from ..kernels.native.ops import NativeLinear
from ..kernels.ops import LocalLinear, Operations
from ..memory.host_memory import allocator
from ..memory.link import LINK_COST, Link, Pair
from ..memory.prefetch import PrefetchItem, PrefetchRing
from ..model.experts import ExpertWeights, grouped, weighted_sum
from ..settings.placement_settings import COPIED_ROWS
from .packed_rows import copy_into, row_bytes, sizes_of, views

HOST_COST = LINK_COST / 2  # to read a byte there, relative to the device's memory: about twice the link's rate
Expert = tuple[LocalLinear, LocalLinear]  # gate and up, down
Linears = tuple[tuple[LocalLinear, ...], tuple[LocalLinear, ...]]  # of all experts: gate and up, down
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExpertTier:
    """The first `kept` sparse layers have their experts on the device, the others in host memory.

    Passes of `rows` rows or more copy them over `link`; in others the host's `operations` run them.
    """

    kept: int
    link: Link
    operations: Operations
    rows: int = COPIED_ROWS


@dataclass(frozen=True)
class _Layer:
    """The experts of a layer: rows of bytes `[experts, size]`, and the first expert over its row.

    `arranged` is that expert in the layout of the device's operations, or None if it is the host's.
    """

    rows: Tensor
    first: Expert
    arranged: Expert | None

    def experts_over(self, rows: Tensor, is_arranged: bool = False) -> list[Expert]:
        """Return the experts over other rows of bytes."""
        like = self.arranged if is_arranged and self.arranged else self.first
        return [_over(like, row) for row in rows]


class _ExpertsItem(PrefetchItem):
    """A copy of all experts of a layer, rows of bytes, to a buffer `[experts, size]`, which may have larger rows."""

    def copies(self, buffer: Tensor) -> list[Pair]:
        count, size = self.source.shape
        if buffer.shape[1] == size:
            return [(buffer[:count], self.source)]
        return [(target[:size], row) for target, row in zip(buffer, self.source, strict=False)]


class ExpertStore:
    """The experts of some layers in pinned host memory, and two buffers on the device, each for those of one layer.

    A layer stays in its buffer until another one is asked for: where a prompt is read layer by layer, all its chunks
    find it there. Like the layers of a model, a store is used by one thread.
    """

    def __init__(self, tier: ExpertTier, device: torch.device, operations: Operations) -> None:
        """Create a store without layers for a model on `device`, which computes by `operations`."""
        self._tier, self._device = tier, device
        self._arrange = _arranging(tier.operations, operations)
        self._layers: list[_Layer] = []
        self._over: dict[tuple[int, int], Linears] = {}  # by buffer and layer
        self._ring: PrefetchRing | None = None
        self._held: tuple[int, Tensor] | None = None  # the layer in use and its buffer
        self._seen = 0
        self.passes = self.experts_run = self.bytes = 0
        self.seconds = 0.0

    def statistics(self) -> ExpertsRun:
        return ExpertsRun(len(self._layers), self.passes, self.experts_run, self.bytes, self.seconds)

    def takes_next(self) -> bool:
        """Return whether the experts of the next sparse layer are to be added; call it once for each."""
        self._seen += 1
        return self._seen > self._tier.kept

    def add(self, experts: ExpertWeights, activated: Activation) -> ExpertWeights:
        """Move a layer's experts, loaded on the CPU but for their router, to pinned memory; return how they run there.

        `activated` is the host's activation. Raises UnsupportedModel if the experts are not alike.
        """
        pairs = list(zip(experts.gate_up, experts.down, strict=True))
        if any(_kind(pair) != _kind(pairs[0]) for pair in pairs):
            raise UnsupportedModel("experts of a layer that have different formats", "use --experts device")
        rows = allocator(self._device)((len(pairs), row_bytes(_tensors(pairs[0]))), torch.uint8)
        for row, pair in zip(rows, pairs, strict=True):
            copy_into(row, _tensors(pair))
        first = _over(pairs[0], rows[0])
        layer = _Layer(rows, first, self._arrange and self._arrange(first))
        self._layers.append(layer)
        hosted = _linears(layer.experts_over(rows))
        away = LayerExperts(self, len(self._layers) - 1, hosted, experts.per_token, activated, self._tier.rows)
        return replace(experts, gate_up=(), down=(), away=away)

    def allocate(self) -> None:
        """Allocate the device's buffers, once all layers are added."""
        if not self._layers:
            return
        count = max(len(layer.rows) for layer in self._layers)
        size = max(
            row_bytes(_tensors(expert)) for layer in self._layers for expert in (layer.first, layer.arranged) if expert
        )
        self._ring = PrefetchRing(
            self._tier.link, torch.empty((2, count, size), dtype=torch.uint8, device=self._device).unbind()
        )

    def expert_bytes(self, layer: int) -> int:
        return self._layers[layer].rows.shape[1]

    def on_device(self, index: int) -> Linears:
        """Return a layer's experts on the device, and begin to copy the next layer's. Raises TransferFailed."""
        if self._held is None or self._held[0] != index:
            assert self._ring is not None, "`allocate` is called before the first pass"
            previous, self._held = self._held, None
            try:
                self._held = index, self._take(self._ring, index, previous)
            except BaseException:
                self._ring.reset()
                raise
        return self._over[self._held[1].data_ptr(), index]

    def _take(self, ring: PrefetchRing, index: int, previous: tuple[int, Tensor] | None) -> Tensor:
        """Return the buffer with a layer's experts, in the device's layout."""
        if previous is not None:
            ring.release(previous[1])
        items = [_ExpertsItem(index + i, layer.rows) for i, layer in enumerate(self._layers[index : index + 2])]
        ring.expect(items)
        buffer, layer = ring.take(items[0]), self._layers[index]
        key, rows = (buffer.data_ptr(), index), buffer[: len(layer.rows)]
        if key not in self._over:
            self._over[key] = _linears(layer.experts_over(rows, is_arranged=True))
        if self._arrange is not None:
            for copied, target in zip(layer.experts_over(rows), zip(*self._over[key], strict=True), strict=True):
                arranged = _tensors(self._arrange(copied))  # all of it, before it replaces what it is made of
                for view, tensor in zip(_tensors(target), arranged, strict=True):
                    view.copy_(tensor)
        self.bytes += layer.rows.nbytes
        return buffer


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer of a store; see `ExpertsAway`."""

    store: ExpertStore
    layer: int
    hosted: Linears
    per_token: int
    activated: Activation  # by the host's operations
    rows: int  # of the least pass that copies them

    def weighted_sum(self, x: Tensor, weights: Tensor, experts: Tensor, activated: Activation) -> Tensor:
        """Run the experts as `ExpertsAway` says; on the host, with its own activation."""
        store = self.store
        store.passes += 1
        if len(x) >= self.rows:
            groups = grouped(experts)
            store.experts_run += len(groups[0])
            return weighted_sum(*store.on_device(self.layer), x, weights, groups, activated)
        rows, shares, groups = x.cpu(), weights.cpu(), grouped(experts.cpu())
        start = time.perf_counter()
        total = weighted_sum(*self.hosted, rows, shares, groups, self.activated)
        store.seconds += time.perf_counter() - start
        store.experts_run += len(groups[0])
        store.bytes += len(groups[0]) * store.expert_bytes(self.layer)
        return total.to(x.device)

    def read_cost(self, tokens: int) -> float:
        count, expert_bytes = len(self.hosted[1]), self.store.expert_bytes(self.layer)
        if tokens >= self.rows:
            return LINK_COST * count * expert_bytes
        return HOST_COST * expected_experts(count, self.per_token, tokens) * expert_bytes


def _arranging(host: Operations, device: Operations) -> Callable[[Expert], Expert] | None:
    """Return what makes an expert of the host's operations one of the device's; None if both have one layout."""
    if host.kernel is None or device.kernel is not None:
        return None
    return lambda expert: (_arranged(expert[0], device), _arranged(expert[1], device))


def _arranged(linear: LocalLinear, device: Operations) -> LocalLinear:
    assert isinstance(linear, NativeLinear), "the host's operations are the kernel's"
    weights, bias = linear.unpacked()
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) < len(weights):  # the model computes in bf16
        return device.quantized_linear(weights, None if bias is None else bias.bfloat16())
    whole = plain[0] if len(plain) == 1 else torch.cat(plain)
    return device.linear(whole, None if bias is None else bias.to(whole.dtype))


def _linears(experts: list[Expert]) -> Linears:
    return tuple(gate_up for gate_up, _ in experts), tuple(down for _, down in experts)


def _tensors(expert: Expert) -> list[Tensor]:
    return [tensor for linear in expert for tensor in linear.tensors()]


def _kind(expert: Expert) -> tuple[Any, ...]:
    return sizes_of(_tensors(expert)), tuple(linear.formats for linear in expert)


def _over(expert: Expert, row: Tensor) -> Expert:
    """Return an expert over the bytes of a row."""
    given = iter(views(row, _tensors(expert)))
    gate_up, down = (linear.over([next(given) for _ in linear.tensors()]) for linear in expert)
    return gate_up, down
