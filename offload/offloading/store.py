"""A full cache's keys and values over tiers of memory: some layers on the device, the others' in host memory.

Tokens of a layer lie in pages. Whole pages of a layer that is not resident lie in host memory; each pass attends to
some of them on the device, as they come over the link, and to the others on the host, at the same time. The newest,
unfinished page of every layer stays on the device. Partial results are merged in the order of their keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..kernels.attention import Partial
from ..kv_cache.block_store import copy_bytes
from ..kv_cache.store import Store
from .host_attention import HostPartials
from .link import Pair
from .prefetch import PrefetchItem
from .prefill import PrefillBuffers
from .tier_reader import TierReader
from .tiers import Tiers


class TieredStore(TierReader):
    """A `Store` (kv_cache/store.py) over tiers. Every pass lies between `begin` and `end`; `truncate` may follow."""

    def __init__(self, shape: ModelShape, tiers: Tiers) -> None:
        self.shape = shape
        self.dtype, self.device = tiers.open.dtype, tiers.open.device
        self.tiers = tiers
        self.grain, self.span = tiers.format.grain, tiers.format.tokens
        self._open_pages: list[int | None] = [None, None]  # the page in each open slot, where host memory has it not
        self._num_whole = 0  # pages before the pass, all in host memory
        self._num_streamed = 0  # of those, how many come over the link; the host attends to the others
        self._running = False
        self._prefill: PrefillBuffers | None = None
        self._rotated = torch.empty(0, dtype=self.dtype, device=self.device)
        self._clock = Stopwatch()

    def near(self, capacity: int) -> Store:
        """See `Store`."""
        return self.tiers.near(capacity)

    # A pass

    def begin(self, start: int, tokens: int, chunk: int | None = None) -> None:
        """Begin a pass as in `Store`, and prefetch its first pages."""
        tiers, size = self.tiers, self.span
        self._recover()
        self._running = True
        self._num_whole = start // size
        self._move_pages(start)
        self._end = start + tokens
        rows = min(tokens, chunk or tokens)
        self._num_streamed = tiers.balance.streamed(self._num_whole, rows) if tiers.host else self._num_whole
        if tokens > size:
            self._prefill = PrefillBuffers(tiers, self._num_whole, self._end, start % size > 0)
        else:
            self._open_pages[self._num_whole % 2] = self._num_whole
            if (last := (self._end - 1) // size) > self._num_whole:
                self._open_pages[last % 2] = last
        tiers.ring.expect(self._prefetch_order(-(-tokens // rows)))

    def _recover(self) -> None:
        """Cancel what is left of a pass that was broken off."""
        if self._running:
            self.tiers.ring.reset()
            self._prefill, self._running = None, False

    def end(self) -> None:
        """End the pass; its tokens are committed. Prefetch for the next one."""
        if self._prefill is not None:
            self._prefill.finish()
            self._prefill = None
            self._open_pages = [None, None]
        self._clock.stop()
        self.tiers.ring.expect(self._prefetch_order(1))  # the link need not wait until the next pass is known
        self._running = False

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, and prefetched pages that hold them."""
        if length // self.span < self._num_whole:
            self.tiers.ring.drop()

    def _prefetch_order(self, passes: int) -> Iterator[PrefetchItem]:
        for layer in range(len(self.tiers.pages)):
            for _ in range(passes):
                yield from (self._item(layer, page) for page in range(self._num_streamed))

    def _item(self, layer: int, page: int) -> PrefetchItem:
        return PrefetchItem((layer, page), partial(_onto, self.tiers.pages[layer, page]))

    def _move_pages(self, start: int) -> None:
        """Move whole pages to the host, and the page that `start` is in to the device."""
        for slot, page in enumerate(self._open_pages):
            if page is not None and page < self._num_whole:
                self._move(self.tiers.pages[:, page], self.tiers.open[:, slot])
            if page != self._num_whole:
                self._open_pages[slot] = None
        if start % self.span and self._open_pages[self._num_whole % 2] is None:
            self._move(self.tiers.open[:, self._num_whole % 2], self.tiers.pages[:, self._num_whole])
            self._open_pages[self._num_whole % 2] = (
                self._num_whole
            )  # also through a long pass, which writes to the other copy

    def _move(self, targets: Tensor, sources: Tensor) -> None:
        link = self.tiers.link
        link.wait(ticket := link.copy(list(zip(targets, sources, strict=True)), link.mark()))
        link.finish(ticket)

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """See `Store`: to host memory, behind the committed tokens; the next pass fetches what it needs."""
        tiers, kept = self.tiers, self.tiers.resident_layers
        self._close_pages()
        if tiers.resident is not None:
            tiers.resident.write(start, keys[:kept], values[:kept])
        for page, at, tokens in self._pages_between(start, start + keys.shape[2]):
            for layer, target in enumerate(tiers.pages[:, page], kept):
                tiers.format.write(target, at, *(x[layer, :, tokens] for x in (keys, values)))

    def load(self, start: int, kv: Tensor) -> None:
        """See `Store`; as `write`."""
        if not self._dumps_blocks:
            self.write(start, *kv.unbind(3))
            return
        tiers, kept, grain = self.tiers, self.tiers.resident_layers, self.grain
        self._close_pages()
        if tiers.resident is not None:
            tiers.resident.load(start, kv[:kept])
        for page, at, tokens in self._pages_between(start, start + kv.shape[2] * grain):
            blocks = kv[kept:, :, tokens.start // grain : tokens.stop // grain]
            first = at // grain
            copy_bytes(tiers.format.grains(tiers.pages[:, page])[:, :, first : first + blocks.shape[2]], blocks)

    def _close_pages(self) -> None:
        """Move the open pages to host memory, after a pass that may have been interrupted."""
        self._recover()
        for slot, page in enumerate(self._open_pages):
            if page is not None:
                self._move(self.tiers.pages[:, page], self.tiers.open[:, slot])
        self._open_pages = [None, None]

    def _pages_between(self, start: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Yield the pages of tokens: number, first position in the page, and which of the tokens it has."""
        for page in range(start // self.span, -(-end // self.span)):
            base = page * self.span
            first, last = max(base, start), min(base + self.span, end)
            yield page, first - base, slice(first - start, last - start)

    # A layer of a pass

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
        tiers = self.tiers
        if layer < tiers.resident_layers:
            return tiers.resident.append(layer, start, q, k, v, rows)
        if self._rotated.shape != q.shape:
            self._rotated = torch.empty(q.shape, dtype=self.dtype, device=self.device)
        for buffer, at, some in self._pages_of(layer - tiers.resident_layers, start, len(q)):
            part = [x[some] for x in (q, k, v)]
            tiers.format.append(buffer, at, *part, tuple(x[some] for x in rows), self._rotated[some])
        return self._rotated

    def _pages_of(self, layer: int, start: int, tokens: int) -> Iterator[tuple[Tensor, int, slice]]:
        """Yield the pages of tokens from position `start` on: buffer, first index in it, and which of the tokens."""
        for page, at, some in self._pages_between(start, start + tokens):
            yield self._buffer(layer, page), at, some

    def _buffer(self, layer: int, page: int) -> Tensor:
        """Return a page of this pass on the device."""
        if self._prefill is not None:
            return self._prefill.buffer(layer, page)
        return self.tiers.open[layer, page % 2]

    def attend(self, layer: int, q: Tensor, start: int) -> Tensor:
        tiers = self.tiers
        if layer < tiers.resident_layers:
            return tiers.resident.attend(layer, q, start)
        layer -= tiers.resident_layers
        rest = self._clock.lap()
        host: Future[HostPartials] | None = None
        if self._num_streamed < self._num_whole:
            host = tiers.host.submit(tiers.pages[layer, self._num_streamed : self._num_whole], q)
        everyone, result = slice(0, len(q)), tiers.format.accumulator(q)
        for page in range(self._num_streamed):
            result.add(everyone, self._streamed(layer, page, q))
        newest = self._newest(layer, q, start)
        if host is not None:
            newest = list(newest)  # meanwhile; its keys come behind the host's
            for part in self._from_host(host, len(q), rest):
                result.add(everyone, part)
        for rows, part in newest:
            result.add(rows, part)
        out = result.output()
        if self._prefill is not None and start + len(q) == self._end:
            self._prefill.store(layer)
        self._clock.start()
        return out

    def _streamed(self, layer: int, page: int, q: Tensor) -> Any:
        tiers = self.tiers
        buffer = tiers.ring.take(self._item(layer, page))
        part = tiers.format.attend(buffer, q, self.span)
        tiers.ring.release(buffer)
        if tiers.ring.seconds is not None:
            tiers.balance.observe_link(tiers.ring.seconds)
        return part

    def _newest(self, layer: int, q: Tensor, start: int) -> Iterator[tuple[slice, Any]]:
        """Attend causally to the pages of this pass, which are on the device; yield the rows and their partials."""
        format, end = self.tiers.format, start + len(q)
        for page in range(self._num_whole, (end - 1) // self.span + 1):
            base, buffer = page * self.span, self._buffer(layer, page)
            inside = slice(max(base - start, 0), max(min(base + self.span, end) - start, 0))
            if inside.start < inside.stop:
                some = q[inside]
                yield inside, format.attend(buffer, some, start + inside.start - base + 1, causal=True)
            if inside.stop < len(q):
                behind = slice(inside.stop, len(q))
                yield behind, format.attend(buffer, q[behind], self.span)

    def _from_host(self, host: Future[HostPartials], rows: int, rest: float | None) -> list[Any]:
        part = host.result()
        self.tiers.balance.observe_host(rows, part.seconds / len(part.partials), rest)
        if self.device.type == "cpu":
            return part.partials
        out, lse = (self._in_one_copy(x).unbind() for x in zip(*part.partials, strict=True))
        return [Partial(*each) for each in zip(out, lse, strict=True)]

    def _in_one_copy(self, parts: Sequence[Tensor]) -> Tensor:
        """Copy the host's tensors to the device as `[parts, ...]`; from pinned memory, or the host would wait."""
        return torch.stack(tuple(parts)).pin_memory().to(self.device, non_blocking=True)


def _onto(source: Tensor, buffer: Tensor) -> list[Pair]:
    return [(buffer, source)]


class Stopwatch:
    """Measures the seconds from one layer's attention to the next one's."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._since = None

    def lap(self) -> float | None:
        return None if self._since is None else time.perf_counter() - self._since
