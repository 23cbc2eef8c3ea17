"""A full cache's keys and values over tiers of memory: some layers on the device, the others in host memory.

The tokens of a layer are divided into pages. Whole pages of a layer that is not resident are in host memory. Each pass
attends to some of them on the device, as they are streamed over the link, and meanwhile to the others on the host. The
newest page of every layer, not yet whole, stays on the device. Partial results are merged in the order of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..kernels.accumulate import Accumulator
from .balance import Stopwatch
from .block_store import copy_bytes
from .disk_pages import DiskPages
from .host_attention import HostResult, add_from_host
from .link import DISK_COST, LINK_COST
from .mean_keys import HostMeanKeys
from .open_pages import OpenPages
from .page import PageRun
from .page_prefill import PlainPrefill, PrefillBuffers
from .prefetch import PrefetchItem, prefetch_order
from .store import Store, given, moved_by
from .tier_reader import TierReader
from .tiers import Tiers
from .tree_attention import Tree


class TieredStore(TierReader):
    """A `Store` (memory/store.py) over tiers. Every pass is between `begin` and `end`; `truncate` may follow."""

    is_recordable = False
    copy_rows = Store.copy_rows
    mean_keys_cost = 1.0  # prefill has kept most of them

    def __init__(self, shape: ModelShape, tiers: Tiers) -> None:
        self.shape = shape
        self.dtype, self.device = tiers.open.dtype, tiers.open.device
        self.tiers, self.kernel = tiers, tiers.format.kernel
        self.grain, self.span = tiers.format.grain, tiers.format.tokens
        self.open_pages = OpenPages(tiers)
        self._num_whole = 0  # whole pages before the pass, all in host memory
        self._num_streamed = 0  # of those, how many are streamed; the host attends to the others
        self._running = False
        self._prefill: PrefillBuffers | None = None
        self._plain_prefill: PlainPrefill | None = None
        self._mean_keys: HostMeanKeys | None = None
        self._rotated = torch.empty(0, dtype=self.dtype, device=self.device)
        self._clock = Stopwatch()

    @property
    def read_cost(self) -> float:
        return DISK_COST if isinstance(self.tiers.pages, DiskPages) else LINK_COST

    def near(self, capacity: int) -> Store:
        """Return an empty store on the device, as in `Store`."""
        return self.tiers.near(capacity)

    def prepare(self) -> Iterator[tuple[int, int]]:
        """Wait until the pages are pinned, as in `Store`."""
        return iter(()) if self.tiers.pinning is None else self.tiers.pinning.progress()

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        """Begin a pass as in `Store`, and prefetch its first pages."""
        tiers, size = self.tiers, self.span
        self._recover()
        if tiers.pinning is not None:
            tiers.pinning.wait()
        self._running = True
        self._num_whole = start // size
        self.open_pages.advance(start, held)
        self._end = start + tokens
        rows = min(tokens, chunk or tokens)
        passes = -(-tokens // rows)  # over the whole pages of a layer
        self._num_streamed = tiers.balance.streamed(self._num_whole, rows) if tiers.host else self._num_whole
        if tokens <= size:
            for page in range(self._num_whole, (self._end - 1) // size + 1):  # one or two
                self.open_pages.open(page)
        elif chunk is not None and tiers.prefills_plainly:
            self._plain_prefill = PlainPrefill(tiers, self.shape, start, self._end, chunk, self._mean_keys)
            self._num_streamed, passes = self._num_whole, 1
        else:
            begun = -(-(start + held) // size) - self._num_whole
            self._prefill = PrefillBuffers(tiers, self.open_pages, self._num_whole, self._end, begun)
        tiers.ring.expect(prefetch_order(tiers.pages, self._num_streamed, passes, tiers.last_visits))

    def _recover(self) -> None:
        """Cancel what is left of an aborted pass."""
        if self._running:
            self.tiers.ring.reset()
            self._prefill = self._plain_prefill = None
            self._running = False

    def end(self) -> None:
        """End the pass, whose tokens are committed, and prefetch for the next one."""
        prefill = self._plain_prefill or self._prefill
        if prefill is not None:
            prefill.finish()
            if self._plain_prefill is not None and self._mean_keys is not None:
                self._mean_keys.commit(self._end)
            self._prefill = self._plain_prefill = None
            self.open_pages.clear()
        self._clock.stop()
        tiers = self.tiers
        # The most likely order: one more pass.
        tiers.ring.expect(prefetch_order(tiers.pages, self._num_streamed, 1, tiers.last_visits))
        self._running = False

    def restartable(self, length: int) -> int:
        """Return `length`: the store can be truncated anywhere."""
        return length

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, and prefetched pages that contain them."""
        if length // self.span < self._num_whole:
            self.tiers.ring.drop()
        if self._mean_keys is not None:
            self._mean_keys.truncate(length)

    def keep_mean_keys(self, chunk: int) -> None:
        """Keep mean keys as in `Store`: from the next prefill layer by layer on, if it has the keys on the device."""
        shape = self.shape
        if self.tiers.prefills_plainly and (self._mean_keys is None or self._mean_keys.chunk != chunk):
            self._mean_keys = None  # free its memory first
            self._mean_keys = HostMeanKeys(self.tiers, shape.kv_heads, shape.head_dim, chunk)

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store tokens as in `Store`, in host memory; the next pass fetches the pages that it needs."""
        self._close_pages()
        self._write(start, keys, values)

    def _write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store tokens in the newest copies of their pages."""
        tiers, resident = self.tiers, self.tiers.resident_layers
        if tiers.resident is not None:
            tiers.resident.write(start, keys[:resident], values[:resident])
        for page, at, tokens in self._pages_between(start, start + keys.shape[2]):
            for layer, target in enumerate(self.open_pages.edited(page, self._is_whole(tokens)), resident):
                tiers.format.write(target, at, *(x[layer, :, tokens].to(target.device) for x in (keys, values)))

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move tokens as in `Store`."""
        if moved := moved_by(self, start, keep):
            self._write(*moved)

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` gave as in `Store`, in host memory."""
        if not self._dumps_blocks:
            self.write(start, *kv.unbind(3))
            return
        tiers, resident, grain = self.tiers, self.tiers.resident_layers, self.grain
        self._close_pages()
        if tiers.resident is not None:
            tiers.resident.load(start, kv[:resident])
        for page, at, tokens in self._pages_between(start, start + kv.shape[2] * grain):
            blocks = kv[resident:, :, tokens.start // grain : tokens.stop // grain]
            first = at // grain
            grains = tiers.format.grains(self.open_pages.edited(page, self._is_whole(tokens)))
            copy_bytes(grains[:, :, first : first + blocks.shape[2]], blocks)

    def _close_pages(self) -> None:
        """Move the open pages to host memory, after a pass that may have been interrupted; not to disk."""
        self._recover()
        if isinstance(self.tiers.pages, Tensor):
            self.open_pages.flush()

    def _is_whole(self, tokens: slice) -> bool:
        """Return whether tokens fill a page."""
        return tokens.stop - tokens.start == self.span

    def _pages_between(self, start: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Yield the pages of tokens: number, first position in the page, and which of the tokens it has."""
        for page in range(start // self.span, -(-end // self.span)):
            base = page * self.span
            first, last = max(base, start), min(base + self.span, end)
            yield page, first - base, slice(first - start, last - start)

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
        tiers = self.tiers
        if layer < tiers.resident_layers:
            return tiers.resident.append(layer, start, q, k, v, rows)
        if self._plain_prefill is not None:
            return self._plain_prefill.append(layer - tiers.resident_layers, start, q, k, v, rows)
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
        return self.open_pages.buffer(layer, page)

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        tiers = self.tiers
        if layer < tiers.resident_layers:
            return tiers.resident.attend(layer, q, start, tree, **given(lse))
        if self._plain_prefill is not None:
            return self._plain_prefill.attend(q, start, lse)
        layer -= tiers.resident_layers
        rest = self._clock.lap()
        host = self._submit(layer, q)
        result = tiers.format.accumulator(q)
        self._attend_streamed(layer, len(q), result)
        if not result.in_order:
            self._attend_newest(layer, start, q, tree, result)  # while the host computes
        if host is not None:
            add_from_host(host, len(q), rest, tiers.balance, result)
        if result.in_order:
            self._attend_newest(layer, start, q, tree, result)
        out = result.output(lse)
        if self._prefill is not None and start + (len(q) if tree is None else len(tree)) == self._end:
            self._prefill.store(layer)
        self._clock.start()
        return out

    def _submit(self, layer: int, q: Tensor) -> Future[HostResult] | None:
        """Start host attention to the whole pages that are not streamed, if there are any."""
        if self._num_streamed == self._num_whole:
            return None
        return self.tiers.host.submit(self.tiers.pages[layer, self._num_streamed : self._num_whole], q)

    def _attend_streamed(self, layer: int, tokens: int, result: Accumulator) -> None:
        """Attend to the pages that are streamed over the link, with all rows."""
        ring, pages, rows = self.tiers.ring, self.tiers.pages, slice(0, tokens)
        for page in range(self._num_streamed):
            buffer = ring.take(PrefetchItem((layer, page), pages))
            result.attend(buffer, rows, self.span)
            ring.release(buffer)
            if ring.seconds is not None:
                self.tiers.balance.observe_link(ring.seconds)

    def _attend_newest(self, layer: int, start: int, q: Tensor, tree: Tree | None, result: Accumulator) -> None:
        """Attend causally to the pages of this pass, which are on the device."""
        if tree is not None:
            pages = range(self._num_whole, (start + len(tree) - 1) // self.span + 1)
            self.tiers.format.attend_tree(self._run_of(layer, pages), q, start % self.span, tree, result)
            return
        tokens = len(q)
        end = start + tokens
        for page in range(self._num_whole, (end - 1) // self.span + 1):
            base, buffer = page * self.span, self._buffer(layer, page)
            inside = slice(max(base - start, 0), max(min(base + self.span, end) - start, 0))
            if inside.start < inside.stop:
                result.attend(buffer, inside, start + inside.start - base + 1, causal=True)
            if inside.stop < tokens:
                result.attend(buffer, slice(inside.stop, tokens), self.span)

    def _run_of(self, layer: int, pages: range) -> PageRun:
        """Return pages of this pass on the device."""
        return (self.open_pages if self._prefill is None else self._prefill).run(layer, pages)
