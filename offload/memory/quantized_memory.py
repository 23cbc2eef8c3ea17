"""Quantised keys and values, and beside them those of the newest windows as they are.

Subclasses do what depends on a kernel: they attend, quantise, and convert. Groups lie in one memory or over tiers.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, WINDOW, ring_blocks
from ..architecture.rope import Rows
from ..settings.kv_formats import KV_FORMATS
from .quantized_groups import GroupTiers, QuantizedGroups
from .store import DeviceStore, Store

WINDOW_BLOCKS = WINDOW // BLOCK
_DEQUANTIZED_AT_ONCE = 32 * 2**20  # bytes of keys in fp32


def runs_of_windows(start: int, tokens: int) -> Iterator[tuple[int, slice]]:
    """Yield tokens from position `start` on by their windows: the first one's position, and which of the tokens."""
    at = start
    while at < start + tokens:
        end = min((at // WINDOW + 1) * WINDOW, start + tokens)
        yield at, slice(at - start, end - start)
        at = end


@dataclass(frozen=True)
class Ring:
    """The newest tokens in the first `size` tokens of a store: position p is at p modulo `size`."""

    size: int
    store: DeviceStore

    def place(self, token: int) -> int:
        """Return where a token of the sequence lies."""
        return token % self.size

    def places(self, tokens: Sequence[int]) -> Tensor:
        """Return where tokens of the sequence lie; for a range, the host does not wait for the device."""
        device = self.store.device
        if isinstance(tokens, range):
            return torch.arange(tokens.start, tokens.stop, device=device) % self.size
        return torch.tensor(tokens, dtype=torch.long, device=device) % self.size

    def runs(self, start: int, tokens: int) -> Iterator[tuple[int, slice]]:
        """Yield runs of tokens that lie one behind the other: where the first one lies, and which of the tokens."""
        at, end = start, start + tokens
        while at < end:
            last = min((at // self.size + 1) * self.size, end)
            yield self.place(at), slice(at - start, last - start)
            at = last

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int) -> Tensor:
        """Store tokens as a `DeviceStore` does."""
        rotated = []
        for at, some in self.runs(start, len(q)):
            own, there = (rows[0][some], rows[1][some]), min(max(stored - some.start, 0), some.stop - some.start)
            queries = self.store.append(layer, at, q[some], k[some], v[some], own, there)
            rotated.append(queries if some.stop - some.start == len(q) else queries.clone())
        return rotated[0] if len(rotated) == 1 else torch.cat(rotated)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move tokens as in `Store`."""
        if moved := [(start + target, start + source) for target, source in enumerate(keep) if target != source]:
            self.store.move(*map(self.places, zip(*moved, strict=True)))


class QuantizedMemory(Store):
    """A `Store` without attention: quantised groups of all whole windows, and a ring of the newest ones as they are.

    Groups may lie over tiers; every pass is then between `begin` and `end`. Subclasses attend, `encode` and `decode`,
    and say by `new_device_store` what the `ring` is.
    """

    least_chunk = GROUP

    def __init__(
        self,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        tiers: GroupTiers | None = None,
    ) -> None:
        """`tiers` has the groups of the last layers; None: all are in the device's memory."""
        self.shape, self.dtype, self.device, self.kind = shape, dtype, device, kind
        self._capacity = -(-capacity // WINDOW) * WINDOW
        self.tiers = tiers
        self.groups = QuantizedGroups(shape, self._capacity, kind, device, tiers)
        if tiers is not None:
            self.page_tokens, self.read_cost = tiers.format.tokens, tiers.pages.read_cost
        self._newest = 0  # the position behind the last token that was stored since the last restart
        self._lost = 0  # the ring has no token before this position
        self._start, self._chunked = 0, False  # of the last pass of the full cache
        self.ring = self._new_ring(ring_blocks(WINDOW) * BLOCK)

    def _new_ring(self, size: int) -> Ring:
        return Ring(size, self.new_device_store(size))

    def _grow(self, tokens: int) -> None:
        """Make the ring large enough for `tokens` tokens, and for rollbacks of two windows."""
        size = ring_blocks(tokens) * BLOCK
        if size <= self.ring.size:
            return
        ring, lost = self._new_ring(size), self._oldest
        for at, some in ring.runs(lost, self._newest - lost):
            ring.store.write(at, *self._read_ring(lost + some.start, lost + some.stop))
        # At once: an interrupt, or too little memory, must leave the old ring.
        self.ring, self._lost = ring, lost

    @property
    def _oldest(self) -> int:
        """The first position from which the ring has all tokens."""
        return max(-(-self._newest // BLOCK) * BLOCK - self.ring.size, self._lost)

    def restartable(self, length: int) -> int:
        """Return the largest length, at most `length`, from which a sequence can go on: with its window in the ring."""
        start = length // WINDOW * WINDOW
        return length if start >= self._oldest else start

    @property
    def resident_layers(self) -> int:
        return self.groups.resident_layers

    def prepare(self) -> Iterator[tuple[int, int]]:
        return super().prepare() if self.tiers is None else self.tiers.prepare()

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        self._start, self._chunked = start, chunk is not None
        if self.tiers is not None:
            assert chunk is None, "a prompt is read chunk by chunk"
            pages = range(start // self.page_tokens, (start + tokens - 1) // self.page_tokens + 1)
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

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int = 0) -> Tensor:
        window = (start if self._chunked else min(self._start, start)) // WINDOW * WINDOW
        self._grow(start + len(q) - window)
        self._newest = max(self._newest, start + len(q))  # before the tokens that this overwrites are lost
        queries = self.ring.append(layer, start, q, k, v, rows, stored)
        self._quantize(layer, start + stored, start + len(q))
        return queries

    def _quantize(self, layer: int, start: int, end: int) -> None:
        """Quantise the windows that tokens from `start` to `end` complete."""
        groups = range(start // WINDOW * WINDOW // GROUP, end // WINDOW * WINDOW // GROUP)
        for at, some in self.ring.runs(groups.start * GROUP, len(groups) * GROUP):
            self.encode(layer, groups[some.start // GROUP : some.stop // GROUP], at)

    @abstractmethod
    def encode(self, layer: int, groups: range, at: int) -> None:
        """Quantise groups of a layer, whose tokens lie in the ring's memory from token `at` on."""

    @abstractmethod
    def decode(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[n, tokens, head_dim]` of groups `[n, groups, bytes]`."""

    def decode_keys(self, groups: Tensor) -> Tensor:
        """Return the keys alone, perhaps in fp32."""
        return self.decode(groups)[0]

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move tokens as in `Store`; the windows that the path completes are quantised."""
        self.ring.compact(start, keep)
        for layer in range(self.shape.layers):
            self._quantize(layer, start, start + len(keep))

    def deepest_tree(self, start: int) -> int:
        """Return the tokens to the end of the window: no token of a tree may see that window quantised."""
        return WINDOW - start % WINDOW

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of whole windows as they lie here, `[layers, kv_heads, bytes]`, uint8."""
        assert start % WINDOW == end % WINDOW == 0, "whole windows are copied"
        groups = self.groups.dump(range(start // GROUP, end // GROUP))
        return groups.clone(memory_format=torch.contiguous_format)

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` of a store of the same format returned, from position `start` on."""
        assert start % WINDOW == 0, "whole windows are copied"
        groups = kv.unflatten(2, (-1, KV_FORMATS[self.kind].run_bytes(self.shape.head_dim)))
        self.groups.load(start // GROUP, groups)
        self._lost = start + groups.shape[2] * GROUP  # first, as in `truncate`
        self._newest = self._lost

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values as in `Store`; those of whole windows are dequantised."""
        return self.read_layers(range(self.shape.layers), start, end)

    def read_layers(self, layers: range, start: int, end: int, border: int | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values `[layers, kv_heads, tokens, head_dim]`, those before `border` dequantised.

        A token sees those before its own window so. Without a `border`, whole windows are dequantised.
        """
        some = slice(layers.start, layers.stop)
        if border is None:
            border = end // WINDOW * WINDOW
            if border < self._oldest:
                border = end  # that window is quantised too
        parts = []
        if start < border:
            groups = range(start // GROUP, -(-border // GROUP))
            inside = slice(start - groups.start * GROUP, border - groups.start * GROUP)
            both = self.decode(self._groups_of(layers, groups))
            parts.append(tuple(x.unflatten(0, (len(layers), -1))[:, :, inside] for x in both))
        if max(start, border) < end:
            parts.append(self._read_ring(max(start, border), end, some))
        keys, values = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        return keys, values

    def _read_ring(self, start: int, end: int, layers: slice = slice(None)) -> tuple[Tensor, Tensor]:
        store, runs = self.ring.store, self.ring.runs(start, end - start)
        parts = [store.read(at, at + some.stop - some.start, layers) for at, some in runs]
        keys, values = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        return keys, values

    def _groups_of(self, layers: range, groups: range) -> Tensor:
        """Return quantised groups `[layers * kv_heads, n, bytes]` on the device."""
        heads = self.shape.kv_heads
        rows = torch.arange(layers.start * heads, layers.stop * heads, device=self.device)
        numbers = torch.arange(groups.start, groups.stop, device=self.device)
        return self.groups.at(rows, numbers.expand(len(rows), -1))

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        """Return mean keys as in `Store`, of whole groups, of which few numbers in fp32 are in memory at once."""
        last = max(end // WINDOW * WINDOW // chunk * chunk, start)
        size = max(_DEQUANTIZED_AT_ONCE // (4 * self.shape.kv_heads * self.shape.head_dim) // chunk, 1) * chunk
        own = range(layer, layer + 1)
        parts = []
        for at in range(start, last, size):
            groups = range(at // GROUP, min(at + size, last) // GROUP)
            parts.append(self.decode_keys(self._groups_of(own, groups)))
        parts += [self.read_layers(own, last, end)[0][0]] if last < end else []
        return torch.cat([x.unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32) for x in parts], dim=1)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks as in `Store`, of whole groups; tokens of a window under way as they are."""
        numbers = torch.arange(size // GROUP, device=self.device) + chunks.unsqueeze(1) * (size // GROUP)
        keys, values = self.decode(self.groups.at(rows, numbers))
        border = ((chunks + 1) * size // WINDOW * WINDOW).clamp_(min=self._oldest)
        partly = ((chunks + 1) * size > border).nonzero().squeeze(1)
        if len(partly):
            tokens = chunks[partly].unsqueeze(1) * size + torch.arange(size, device=self.device)
            is_exact = (tokens >= border[partly].unsqueeze(1)).unsqueeze(-1)
            slots = tokens[:, ::BLOCK] % self.ring.size // BLOCK
            own = self.ring.store.gather(rows[partly].repeat_interleave(size // BLOCK), slots.flatten(), BLOCK)
            for x, exact in zip((keys, values), own, strict=True):
                x[partly] = torch.where(is_exact, exact.reshape(len(partly), size, -1), x[partly])
        return keys, values
