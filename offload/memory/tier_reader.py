"""Reads from a tiered store outside of a pass: keys and values of some tokens, and mean keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.tier_footprint import GATHERED_BYTES
from .disk_gather import read_grains
from .disk_pages import DiskPages
from .host_memory import allocator
from .mean_keys import HostMeanKeys
from .open_pages import OpenPages
from .page import NativePageFormat
from .tiers import Tiers


class TierReader:
    """Reads tokens from the tier that has them; host memory is read over the link."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    span: int
    tiers: Tiers
    open_pages: OpenPages
    _mean_keys: HostMeanKeys | None
    _staging: Tensor | None = None  # pinned memory for gathered blocks, from the first time on

    @property
    def resident_layers(self) -> int:
        """Return how many layers are resident, as in `Store`."""
        return self.tiers.resident_layers

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as in `Store`."""
        tiers = self.tiers
        runs = []
        for page in range(start // self.span, -(-end // self.span)):
            base = page * self.span
            runs.append(self._run(page, max(start - base, 0), min(end - base, self.span)))
        offloaded = [torch.cat(parts, dim=2) for parts in zip(*runs, strict=True)]
        if tiers.resident is None:
            return tuple(offloaded)
        return tuple(torch.cat(both) for both in zip(tiers.resident.read(start, end), offloaded, strict=True))

    def export(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values in host memory, as in `Store`; host pages are not copied to the device."""
        tiers = self.tiers
        runs = []
        for page in range(start // self.span, -(-end // self.span)):
            base, source = page * self.span, self.open_pages.newest(page).cpu()
            at = slice(max(start - base, 0), min(end - base, self.span))
            runs.append([torch.stack(x)[:, :, at] for x in zip(*map(tiers.format.read, source), strict=True)])
        offloaded = [torch.cat(parts, dim=2) for parts in zip(*runs, strict=True)]
        if tiers.resident is None:
            return tuple(offloaded)
        return tuple(torch.cat(both) for both in zip(tiers.resident.export(start, end), offloaded, strict=True))

    def dump(self, start: int, end: int) -> Tensor:
        """Return tokens as in `Store`, copied to host memory."""
        tiers, grain = self.tiers, self.tiers.format.grain
        if not self._dumps_blocks:
            return torch.stack(self.export(start, end), 3)
        runs = []
        for page in range(start // self.span, -(-end // self.span)):
            base, source = page * self.span, self.open_pages.newest(page).cpu()
            at = slice(max(start - base, 0) // grain, min(end - base, self.span) // grain)
            runs.append(tiers.format.grains(source)[:, :, at])
        offloaded = torch.cat(runs, dim=2)
        return offloaded if tiers.resident is None else torch.cat((tiers.resident.dump(start, end), offloaded))

    @property
    def _dumps_blocks(self) -> bool:
        """Return whether `dump` returns the native kernel's blocks, as its other stores do."""
        return isinstance(self.tiers.format, NativePageFormat)

    def _run(self, page: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of some tokens of a page, of all layers that are not resident."""
        format = self.tiers.format
        begin, end = first // format.grain, -(-last // format.grain)
        grains = format.grains(self.open_pages.newest(page))[:, :, begin:end].flatten(0, 1)
        at = slice(first - begin * format.grain, last - begin * format.grain)
        both = format.read_grains(grains if page in self.open_pages else self._fetched(grains))
        return tuple(x.unflatten(0, (-1, self.shape.kv_heads))[:, :, at] for x in both)

    def _fetched(self, x: Tensor) -> Tensor:
        """Copy a tensor from host memory to the device, over the link."""
        tiers = self.tiers
        source = x.contiguous()
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        # The mark, because earlier work may still use the target's memory.
        tiers.link.wait(ticket := tiers.link.copy([(target, source)], tiers.link.mark()))
        tiers.link.finish(ticket)
        return target

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks as in `Store`."""
        tiers, heads = self.tiers, self.shape.kv_heads
        offloaded = rows >= tiers.resident_layers * heads
        found = self._gather_offloaded(rows[offloaded] - tiers.resident_layers * heads, chunks[offloaded], size)
        if tiers.resident is None:
            return found
        near = tiers.resident.gather(rows[~offloaded], chunks[~offloaded], size)
        both = []
        for far, close in zip(found, near, strict=True):
            whole = torch.empty((len(rows), *far.shape[1:]), dtype=self.dtype, device=self.device)
            whole[offloaded], whole[~offloaded] = far, close
            both.append(whole)
        return tuple(both)

    def _gather_offloaded(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Gather in parts, so that the memory for a part's blocks does not depend on the budget."""
        shape = (len(rows), size, self.shape.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        most = max(1, GATHERED_BYTES // (2 * size * self.shape.head_dim * self.dtype.itemsize))
        for start in range(0, len(rows), most):
            part = slice(start, start + most)
            keys[part], values[part] = self._gather_part(rows[part], chunks[part], size)
        return keys, values

    def _gather_part(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        tiers, format = self.tiers, self.tiers.format
        rows, chunks = rows.cpu(), chunks.cpu()
        layer, head = (x.unsqueeze(1) for x in (rows // self.shape.kv_heads, rows % self.shape.kv_heads))
        tokens = chunks.unsqueeze(1) * size + torch.arange(0, size, format.grain)
        page, grain = tokens // self.span, tokens % self.span // format.grain
        if isinstance(tiers.pages, DiskPages):
            picked = self._on_device(read_grains(tiers, *torch.broadcast_tensors(layer, page, head, grain)))
        else:
            grains = format.grains(tiers.pages)  # [layers, pages, kv_heads, grains, ...]
            _, pages, heads, each = grains.shape[:4]
            at = ((layer * pages + page) * heads + head) * each + grain
            picked = self._fetched(self._staged(grains.flatten(0, 3), at.flatten())).unflatten(0, at.shape)
        is_open = self.open_pages.contains(page).all(1).nonzero().squeeze(1)  # a chunk is within one page
        if len(is_open):
            at = [x.expand_as(page)[is_open].to(self.device) for x in (layer, page % 2, head, grain)]
            picked[is_open.to(self.device)] = format.grains(tiers.open)[tuple(at)]
        return format.read_grains(picked)

    def _staged(self, grains: Tensor, at: Tensor) -> Tensor:
        """Copy rows of `grains` into the staging buffer, since copies from pageable memory are slow."""
        if self._staging is None:
            size = GATHERED_BYTES // self.dtype.itemsize
            self._staging = allocator(self.device)((size,), self.dtype)
        shape = (len(at), *grains.shape[1:])
        staged = self._staging[: shape[0] * grains[0].numel()].view(shape)
        return torch.index_select(grains, 0, at, out=staged)

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        """Return mean keys as in `Store`: what a prefill kept; the others are computed on the device, page by page."""
        tiers = self.tiers
        if layer < tiers.resident_layers:
            return tiers.resident.mean_keys(layer, start, end, chunk)
        layer, means = layer - tiers.resident_layers, []
        if self._mean_keys is not None and self._mean_keys.chunk == chunk:
            kept = self._mean_keys.read(layer, start, end)
            if len(kept):
                means.append(self._on_device(kept).transpose(0, 1).float())
                start += len(kept) * chunk
        while start < end:
            page, first = divmod(start, self.span)
            keys, _ = tiers.format.read(self._on_device(self.open_pages.newest(page, slice(layer, layer + 1))[0]))
            some = keys[:, first : first + end - start]
            means.append(some.unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32))
            start += some.shape[1]
        return torch.cat(means, dim=1)

    def _on_device(self, x: Tensor) -> Tensor:
        return x if x.device.type == self.device.type else self._fetched(x)
