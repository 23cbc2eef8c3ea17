"""A full cache's keys and values over tiers of memory, in pages of any `PageFormat`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.pages import GATHERED_BYTES
from ..architecture.rope import Rows, rotate
from ..kernels.accumulate import Accumulator
from .packed_pages import PlanePages
from .page import PageFormat
from .page_prefill import HostMeanKeys, PagedPrefill
from .store import DeviceStore, Store, first_moved
from .tiers import Tiers
from .tree_attention import Tree


class TieredStore(Store):
    """The first layers in a store on the device, `resident`; the pages of the others over tiers.

    Every pass is between `begin` and `end`. Partial results are merged in the order of keys. Where packed pages are
    divided in planes, drafted tokens are in the open pages, behind the committed ones, until a verification writes over
    them.
    """

    mean_keys_cost = 1.0  # prefill has kept most of them

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        tiers: Tiers[PageFormat],
        resident: DeviceStore | None,
        new_device_store: Callable[[ModelShape, int], DeviceStore],
    ) -> None:
        """`shape` is of all layers; `new_device_store` makes stores of some capacity for the layers of a shape."""
        self.shape, self.dtype, self.device = shape, dtype, tiers.device
        self.tiers, self.format, self.kernel = tiers, tiers.format, tiers.format.kernel
        self.least_chunk, self.page_tokens = tiers.format.least_chunk, tiers.format.tokens
        self.read_cost = tiers.pages.read_cost
        self._resident, self._first = resident, shape.layers - len(tiers.pages)
        self._new_device_store = new_device_store
        self._prefill: PagedPrefill | None = None
        self._mean_keys: HostMeanKeys | None = None
        self._rotated = torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def resident_layers(self) -> int:
        return self._first

    @property
    def has_planes(self) -> bool:
        return isinstance(self.tiers.pages, PlanePages)

    def _on_device(self, layer: int) -> DeviceStore | None:
        """Return the store of a layer's keys and values on the device, if they lie in one."""
        return self._resident if layer < self._first else None

    def new_device_store(self, capacity: int) -> DeviceStore:
        return self._new_device_store(self.shape, capacity)

    def prepare(self) -> Iterator[tuple[int, int]]:
        return self.tiers.prepare()

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        tiers, page = self.tiers, self.page_tokens
        chunk = min(tokens, chunk or tokens)
        tiers.begin(start, chunk, held)
        self._prefill, end = None, start + tokens
        if tokens <= page:
            for opened, _, _ in tiers.split(start, end):  # one or two
                tiers.open_pages.open(opened)
            tiers.expect(-(-tokens // chunk))
        else:
            with torch.inference_mode(False):
                layer = self._new_device_store(replace(self.shape, layers=1), -(-end // page) * page)
            self._prefill = PagedPrefill(tiers, layer, start + held, end, chunk, self._mean_keys)
            tiers.num_streamed = tiers.num_whole
            tiers.expect()

    def end(self) -> None:
        """End the pass, whose tokens are committed, and prefetch for the next one."""
        if (prefill := self._prefill) is not None:
            prefill.finish()
            if self._mean_keys is not None:
                self._mean_keys.commit(prefill.end)
            self._prefill = None
            self.tiers.open_pages.clear()
        self.tiers.end()

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, and prefetched pages that contain them."""
        self.tiers.truncate(length)
        if self._mean_keys is not None:
            self._mean_keys.truncate(length)

    def keep_mean_keys(self, chunk: int) -> None:
        """Keep mean keys as in `Store`: from the next pass over more tokens than a page has on."""
        shape = self.shape
        if self._mean_keys is None or self._mean_keys.chunk != chunk:
            self._mean_keys = None  # free its memory first
            self._mean_keys = HostMeanKeys(self.tiers, shape.kv_heads, shape.head_dim, chunk)

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int = 0) -> Tensor:
        if (resident := self._on_device(layer)) is not None:
            return resident.append(layer, start, q, k, v, rows, stored)
        layer -= self._first
        if self._prefill is not None:
            return self._prefill.append(layer, start, q, k, v, rows)
        if self._rotated.shape != q.shape:
            self._rotated = torch.empty(q.shape, dtype=self.dtype, device=self.device)
        if stored:
            self._rotated[:stored] = rotate(q[:stored], (rows[0][:stored], rows[1][:stored]))
        for page, inside, part in self.tiers.split(start + stored, start + len(q)):
            some = slice(part.start + stored, part.stop + stored)
            new, angles = (q[some], k[some], v[some]), (rows[0][some], rows[1][some])
            buffer = self.tiers.open_pages.buffer(layer, page)
            self.format.append(buffer, inside.start, *new, angles, self._rotated[some])
        return self._rotated

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        if (resident := self._on_device(layer)) is not None:
            return resident.attend(layer, q, start, tree, lse)
        layer -= self._first
        if self._prefill is not None:
            return self._prefill.attend(q, start, tree, lse)
        result, rows = self.format.accumulator(q), slice(0, len(q))
        for whole in self.tiers.attend(layer, q, result):
            if whole is None:
                self._attend_newest(layer, start, q, tree, result)
            else:
                result.attend(whole[1], rows, self.page_tokens)
        return result.output(lse)

    def _attend_newest(self, layer: int, start: int, q: Tensor, tree: Tree | None, result: Accumulator) -> None:
        """Attend causally to the open pages."""
        num_whole, open_pages = self.tiers.num_whole, self.tiers.open_pages
        if tree is not None:
            first = start // self.page_tokens
            for page in range(num_whole, first):  # of drafted tokens
                result.attend(open_pages.buffer(layer, page), slice(0, len(q)), self.page_tokens)
            pages = range(first, (start + len(tree) - 1) // self.page_tokens + 1)
            self.format.attend_tree(open_pages.run(layer, pages), q, start % self.page_tokens, tree, result)
            return
        tokens = len(q)
        end = start + tokens
        for page in range(num_whole, (end - 1) // self.page_tokens + 1):
            base, buffer = page * self.page_tokens, open_pages.buffer(layer, page)
            inside = slice(max(base - start, 0), max(min(base + self.page_tokens, end) - start, 0))
            if inside.start < inside.stop:
                result.attend(buffer, inside, start + inside.start - base + 1, causal=True)
            if inside.stop < tokens:
                result.attend(buffer, slice(inside.stop, tokens), self.page_tokens)

    def open_draft(self, start: int, end: int) -> None:
        tiers = self.tiers
        tiers.recover()
        tiers.truncate(start)
        self._prefill = None  # of an aborted pass
        tiers.num_whole = start // self.page_tokens
        tiers.open_pages.advance(start, end - start)
        for page, _, _ in tiers.split(start, end):
            tiers.open_pages.open(page)

    def attend_plane(
        self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        if (resident := self._on_device(layer)) is not None:
            return resident.attend(layer, q, start, tree, lse)
        layer -= self._first
        pages, result, rows = self.tiers.pages, self.format.accumulator(q), slice(0, len(q))
        assert isinstance(pages, PlanePages)
        for page, tokens in pages.layout.drafted(pages.planes[layer, : self.tiers.num_whole]):
            result.attend(page, rows, tokens)
        self._attend_newest(layer, start, q, tree, result)
        return result.output(lse)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        if (first := first_moved(keep)) < len(keep):
            at = torch.tensor([index - first for index in keep[first:]], device=self.device)
            keys, values = (x.index_select(2, at) for x in self._read_pages(start + first, start + keep[-1] + 1))
            self._write(start + first, keys, values)
            if self._resident is not None:
                self._resident.compact(start, keep)

    def _write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store tokens in the newest copies of their pages."""
        for page, at, tokens in self.tiers.split(start, start + keys.shape[2]):
            pages = self.tiers.open_pages.edited(page, whole=at.stop - at.start == self.page_tokens)
            for layer, target in enumerate(pages):
                both = (x[layer, :, tokens].to(target.device) for x in (keys, values))
                self.format.write(target, at.start, *both)

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` gave as in `Store`, in host memory; the next pass fetches the pages that it needs."""
        if self._resident is not None:
            self._resident.load(start, kv[: self._first])
        paged = kv[self._first :]
        if self.format.dumps_parts:
            self.tiers.load(start // self.least_chunk, paged, self.least_chunk)
        else:
            self.tiers.close_pages()
            self._write(start, *paged.unbind(3))

    def dump(self, start: int, end: int) -> Tensor:
        if self.format.dumps_parts:
            kv = self.tiers.dump(start // self.least_chunk, -(-end // self.least_chunk), self.least_chunk)
        else:
            kv = torch.stack(self._export_pages(start, end), 3)
        return kv if self._resident is None else torch.cat((self._resident.dump(start, end), kv))

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._read_pages(start, end)
        if self._resident is not None:
            keys, values = map(torch.cat, zip(self._resident.read(start, end), (keys, values), strict=True))
        return keys, values

    def _read_pages(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return _joined([self._read_page(page, at.start, at.stop) for page, at, _ in self.tiers.split(start, end)])

    def _export_pages(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        parts = []
        for page, at, _ in self.tiers.split(start, end):
            layers = map(self.format.read, self.tiers.open_pages.newest(page).cpu())
            keys, values = (torch.stack(x)[:, :, at] for x in zip(*layers, strict=True))
            parts.append((keys, values))
        return _joined(parts)

    def _read_page(self, page: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of some tokens of a page, on the device."""
        size, pages = self.least_chunk, self.tiers.open_pages
        begin, end = first // size, -(-last // size)
        parts = self.format.parts(pages.newest(page))[:, :, begin:end].flatten(0, 1)
        at = slice(first - begin * size, last - begin * size)
        both = self.format.read_parts(parts if page in pages else self.tiers.to_device(parts))
        keys, values = (x.unflatten(0, (-1, self.shape.kv_heads))[:, :, at] for x in both)
        return keys, values

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        if self._resident is None:
            return self._gather_pages(rows, chunks, size)
        keys, values = self._new_chunks(len(rows), size)
        first = self._first * self.shape.kv_heads
        for gather, some, before in (
            (self._gather_pages, rows >= first, first),
            (self._resident.gather, rows < first, 0),
        ):
            if some.any():
                keys[some], values[some] = gather(rows[some] - before, chunks[some], size)
        return keys, values

    def _new_chunks(self, count: int, size: int) -> tuple[Tensor, Tensor]:
        shape = (count, size, self.shape.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return keys, values

    def _gather_pages(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks in portions: the memory for their parts of pages does not grow with the budget."""
        keys, values = self._new_chunks(len(rows), size)
        most = max(1, GATHERED_BYTES // (2 * size * self.shape.head_dim * self.dtype.itemsize))
        for start in range(0, len(rows), most):
            part = slice(start, start + most)
            keys[part], values[part] = self._gather_part(rows[part].cpu(), chunks[part].cpu(), size)
        return keys, values

    def _gather_part(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        tokens = chunks.unsqueeze(1) * size + torch.arange(0, size, self.least_chunk)
        layer, head = (x.unsqueeze(1) for x in (rows // self.shape.kv_heads, rows % self.shape.kv_heads))
        at = tokens % self.page_tokens // self.least_chunk
        return self.format.read_parts(self.tiers.gather(layer, tokens // self.page_tokens, head, at))

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        """Return mean keys as in `Store`: what a prefill kept; the others are computed on the device, page by page."""
        if (resident := self._on_device(layer)) is not None:
            return resident.mean_keys(layer, start, end, chunk)
        layer -= self._first
        means = []
        if self._mean_keys is not None and self._mean_keys.chunk == chunk:
            kept = self._mean_keys.read(layer, start, end)
            if len(kept):
                means.append(self.tiers.to_device(kept).transpose(0, 1).float())
                start += len(kept) * chunk
        parts = {page: at for page, at, _ in self.tiers.split(start, end)} if start < end else {}
        for page, memory in self._newest(layer, list(parts)):
            keys, _ = self.format.read(memory)
            means.append(keys[:, parts[page]].unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32))
        return torch.cat(means, dim=1)

    def _newest(self, layer: int, pages: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield consecutive pages of a layer on the device; those before the open ones come over the link together."""
        tiers = self.tiers
        count = next((at for at, page in enumerate(pages) if page in tiers.open_pages), len(pages))
        for page, memory in tiers.fetched(layer, range(pages[0], pages[0] + count)) if count else ():
            yield page, self.format.plain(memory)
        for page in pages[count:]:
            newest = tiers.open_pages.newest(page, range(layer, layer + 1))[0]
            yield page, newest if page in tiers.open_pages else tiers.to_device(newest)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return keys and values of consecutive tokens as one tensor each."""
    keys, values = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    return keys, values
