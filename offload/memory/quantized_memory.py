"""Quantised keys and values, and beside them the bf16 ones of the sink and of the newest windows.

Subclasses do what depends on a kernel: they attend, quantise, and convert. Groups lie in one memory or over tiers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW, group_bytes, ring_blocks
from .block_store import copy_bytes
from .quantized_groups import GROUP_BLOCKS, GroupMemory, GroupPages, GroupTiers
from .store import Store

SINK_BLOCKS, WINDOW_BLOCKS = SINK // BLOCK, WINDOW // BLOCK


def window_capacity(capacity: int) -> int:
    """Return the tokens of the windows in which `capacity` tokens lie."""
    return -(-capacity // WINDOW) * WINDOW


def place_in_ring(block: int, ring: int) -> int:
    """Return where block `block` of a sequence lies among those of the sink and of a ring of `ring` blocks."""
    return block if block < SINK_BLOCKS else SINK_BLOCKS + block % ring


@dataclass(frozen=True)
class Ring:
    """Memory of the sink's blocks, of a ring of `size` blocks, and of scratch blocks of two windows behind it.

    `blocks` `[layers, kv_heads, ..., slots, numbers]`.
    """

    size: int
    blocks: Tensor


class QuantizedMemory(Store):
    """A `Store` without attention: quantised groups of all whole windows, and a ring of bf16 blocks of the newest ones.

    Over tiers, every pass is between `begin` and `end`.
    """

    grain = GROUP

    def __init__(
        self,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        tiers: GroupTiers | None = None,
    ) -> None:
        """`tiers` is where the groups lie; None: in the device's memory."""
        self.shape, self.dtype, self.device, self.kind = shape, dtype, device, kind
        self._capacity = window_capacity(capacity)
        self.tiers = tiers
        self.groups: GroupMemory | GroupPages
        if tiers is None:
            self.groups = GroupMemory(shape, self._capacity, kind, device)
        else:
            self.groups, self.span, self.read_cost = GroupPages(tiers), tiers.format.tokens, tiers.read_cost
        self._newest = 0  # the position behind the last token that was stored since the last restart
        self._lost = 0  # the ring has no token before this position
        self._start, self._chunked = 0, False  # of the last pass of the full cache
        self._ring = self._ring_of(ring_blocks(WINDOW))
        self._rotated = torch.empty(0, dtype=dtype, device=device)

    def _grow(self, tokens: int) -> None:
        """Make the ring large enough for `tokens` tokens, and for rollbacks of two windows."""
        size = ring_blocks(tokens)
        if size <= self._ring.size:
            return
        ring, lost = self._ring_of(size), self._oldest
        kept = (*range(SINK_BLOCKS), *range(lost // BLOCK, -(-self._newest // BLOCK)))
        places = [place_in_ring(block, size) for block in kept], [self._slot(block) for block in kept]
        targets, sources = (torch.tensor(slots, device=self.device) for slots in places)
        ring.blocks.index_copy_(-2, targets, self._ring.blocks.index_select(-2, sources))
        # At once: an interrupt, or too little memory, must leave the old ring.
        self._ring, self._lost = ring, lost

    def _ring_of(self, size: int) -> Ring:
        return self._new_ring(size, SINK_BLOCKS + size + 2 * WINDOW_BLOCKS)

    @abstractmethod
    def _new_ring(self, size: int, slots: int) -> Ring:
        """Return a ring of `size` blocks, in memory of `slots` blocks."""

    def _slot(self, block: int) -> int:
        return place_in_ring(block, self._ring.size)

    @property
    def _oldest(self) -> int:
        """The first position from which the ring has all tokens."""
        return max(-(-self._newest // BLOCK) * BLOCK - self._ring.size * BLOCK, self._lost)

    def restartable(self, length: int) -> int:
        """Return the largest length, at most `length`, from which a sequence can go on: with its window in the ring."""
        start = length // WINDOW * WINDOW
        return length if start >= self._oldest else start

    @property
    def resident_layers(self) -> int:
        return self.shape.layers if self.tiers is None else 0

    def prepare(self) -> Iterator[tuple[int, int]]:
        return super().prepare() if self.tiers is None else self.tiers.prepare()

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        """Begin a pass as in `Store`, and prefetch its first pages."""
        self._start, self._chunked = start, chunk is not None
        if self.tiers is not None:
            assert chunk is None, "a prompt is read chunk by chunk"
            pages = range(start // self.span, (start + tokens - 1) // self.span + 1)
            self.tiers.begin(start, tokens, held, len(pages))
            for page in pages:
                self.tiers.open_pages.open(page)
            self.tiers.expect()

    def end(self) -> None:
        if self.tiers is not None:
            self.tiers.end()

    def truncate(self, length: int) -> None:
        if self.tiers is not None:
            self.tiers.truncate(length)
        self._start = min(self._start, length)
        if length // WINDOW * WINDOW < self._oldest:
            self._lost = length  # first: an interrupt between the two must not leave tokens in the ring that are not
            self._newest = length

    def append(
        self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor], stored: int = 0
    ) -> Tensor:
        """Store tokens as in `Store`; of the first `stored`, already there, only queries are rotated."""
        window = (start if self._chunked else min(self._start, start)) // WINDOW * WINDOW
        self._grow(start + len(q) - window)
        self._newest = max(self._newest, start + len(q))  # before the tokens that this overwrites are lost
        if self._rotated.shape != q.shape:
            self._rotated = torch.empty(q.shape, dtype=self.dtype, device=self.device)
        for at, some in self._runs(start, len(q)):
            part = (x[some] for x in (q, k, v))
            own = tuple(x[some] for x in rows)
            there = min(max(stored - some.start, 0), some.stop - some.start)
            self._put(layer, at, *part, own, self._rotated[some], there)
        self._quantize(layer, start + stored, start + len(q))
        return self._rotated

    @abstractmethod
    def _put(
        self,
        layer: int,
        at: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, Tensor],
        rotated: Tensor,
        stored: int,
    ) -> None:
        """Store tokens from place `at` of the ring's memory on, but the first `stored`; write rotated queries."""

    def _runs(self, start: int, tokens: int) -> Iterator[tuple[int, slice]]:
        """Yield runs of tokens whose slots follow each other: the position of the first slot, and which tokens."""
        at = start
        while at < start + tokens:
            block = at // BLOCK
            end = SINK_BLOCKS if block < SINK_BLOCKS else (block // self._ring.size + 1) * self._ring.size
            last = min(end * BLOCK, start + tokens)
            yield self._slot(block) * BLOCK + at % BLOCK, slice(at - start, last - start)
            at = last

    def _quantize(self, layer: int, start: int, end: int) -> None:
        """Quantise the windows that tokens from `start` to `end` complete."""
        first, last = start // WINDOW * WINDOW, end // WINDOW * WINDOW
        groups = range(max(first, SINK) // GROUP, last // GROUP)
        if groups:
            self._quantize_groups(layer, groups, [self._slot(group * GROUP_BLOCKS) for group in groups])

    @abstractmethod
    def _quantize_groups(self, layer: int, groups: range, slots: list[int]) -> None:
        """Quantise groups of a layer, whose blocks begin at these slots."""

    @abstractmethod
    def _dequantized(self, layer: int, groups: range) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values `[kv_heads, tokens, head_dim]` of quantised groups."""

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move tokens as in `Store`; the windows that the path completes are quantised."""
        moved = [(target, source) for target, source in enumerate(keep) if target != source]
        if moved:
            self._move(*(self._token_slots([start + at for at in some]) for some in zip(*moved, strict=True)))
        for layer in range(self.shape.layers):
            self._quantize(layer, start, start + len(keep))

    @abstractmethod
    def _move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy tokens of all layers between places of the ring's memory."""

    def _token_slots(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(
            [self._slot(token // BLOCK) * BLOCK + token % BLOCK for token in tokens], device=self.device
        )

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values as in `Store`; those of whole windows are dequantised."""
        layers = [self._read(layer, start, end) for layer in range(self.shape.layers)]
        keys, values = (torch.stack(x) for x in zip(*layers, strict=True))
        return keys, values

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of whole windows as they lie here, `[layers, kv_heads, bytes]`, uint8: groups, and the sink.

        The sink's bf16 blocks stand in place of its group. Nothing else is kept in bf16 behind a whole window's end.
        """
        assert start % WINDOW == end % WINDOW == 0, "whole windows are copied"
        groups = self.groups.dump(range(max(start, SINK) // GROUP, end // GROUP))
        if start >= SINK:
            return groups.clone(memory_format=torch.contiguous_format)
        return torch.cat((self._sink.flatten(2).view(torch.uint8).to(groups.device), groups), dim=2)

    @property
    def _sink(self) -> Tensor:
        """The blocks of the sink `[layers, kv_heads, ..., numbers]`."""
        return self._ring.blocks[..., :SINK_BLOCKS, :]

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` of a store of the same format returned, from position `start` on."""
        assert start % WINDOW == 0, "whole windows are copied"
        if start < SINK:
            sink = self._sink
            size = sink[0, 0].numel() * sink.element_size()
            copy_bytes(sink, kv[:, :, :size].contiguous().view(self.dtype).view(sink.shape))
            kv = kv[:, :, size:]
        groups = kv.unflatten(2, (-1, group_bytes(self.kind, self.shape.head_dim)))
        first = max(start, SINK) // GROUP
        self.groups.load(first, groups)
        self._lost = (first + groups.shape[2]) * GROUP  # first, as in `truncate`
        self._newest = self._lost

    def _read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values `[kv_heads, tokens, head_dim]`."""
        border = end // WINDOW * WINDOW
        if border < self._oldest:  # that window is quantised too
            border = end
        parts = [self._read_ring(layer, start, min(end, SINK))]
        low = max(start, SINK)
        if low < border:
            groups = range(low // GROUP, -(-border // GROUP))
            both = self._dequantized(layer, groups)
            inside = slice(low - groups[0] * GROUP, border - groups[0] * GROUP)
            parts.append(tuple(x[:, inside] for x in both))
        parts.append(self._read_ring(layer, max(low, border), end))
        keys, values = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        return keys, values

    def _read_ring(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        blocks = range(start // BLOCK, -(-end // BLOCK)) if start < end else range(0)
        inside = slice(start % BLOCK, start % BLOCK + max(end - start, 0))
        both = self._read_slots(layer, [self._slot(block) for block in blocks])
        keys, values = (x[:, inside] for x in both)
        return keys, values

    @abstractmethod
    def _read_slots(self, layer: int, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Return keys and values `[kv_heads, tokens, head_dim]` of slots of the ring's memory."""

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        return self._read(layer, start, end)[0].unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32)
