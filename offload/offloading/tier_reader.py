"""What others ask of a tiered store: some tokens' keys and values, and mean keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from .page import NativePageFormat
from .tiers import Tiers


class TierReader:
    """Reads from whichever tier has it; what comes from host memory comes over the link."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    span: int
    tiers: Tiers
    _open_pages: list[int | None]

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        tiers = self.tiers
        runs = []
        for page in range(start // self.span, -(-end // self.span)):
            base = page * self.span
            runs.append(self._run(page, max(start - base, 0), min(end - base, self.span)))
        away = [torch.cat(parts, dim=2) for parts in zip(*runs, strict=True)]
        if tiers.resident is None:
            return tuple(away)
        return tuple(torch.cat(both) for both in zip(tiers.resident.read(start, end), away, strict=True))

    def export(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """See `Store`. What is in host memory does not see the device."""
        tiers = self.tiers
        runs = []
        for page in range(start // self.span, -(-end // self.span)):
            base, source = page * self.span, self._source(page).cpu()
            at = slice(max(start - base, 0), min(end - base, self.span))
            runs.append([torch.stack(x)[:, :, at] for x in zip(*map(tiers.format.read, source), strict=True)])
        away = [torch.cat(parts, dim=2) for parts in zip(*runs, strict=True)]
        if tiers.resident is None:
            return tuple(away)
        return tuple(torch.cat(both) for both in zip(tiers.resident.export(start, end), away, strict=True))

    def dump(self, start: int, end: int) -> Tensor:
        """See `Store`."""
        tiers, grain = self.tiers, self.tiers.format.grain
        if not self._dumps_blocks:
            return torch.stack(self.export(start, end), 3)
        runs = []
        for page in range(start // self.span, -(-end // self.span)):
            base, source = page * self.span, self._source(page).cpu()
            at = slice(max(start - base, 0) // grain, min(end - base, self.span) // grain)
            runs.append(tiers.format.grains(source)[:, :, at])
        away = torch.cat(runs, dim=2)
        return away if tiers.resident is None else torch.cat((tiers.resident.dump(start, end), away))

    @property
    def _dumps_blocks(self) -> bool:
        """Return whether `dump` returns the native kernel's blocks, as its other stores do."""
        return isinstance(self.tiers.format, NativePageFormat)

    def _run(self, page: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Some tokens of a page, of all layers that are not resident."""
        format = self.tiers.format
        begin, end = first // format.grain, -(-last // format.grain)
        grains = format.grains(self._source(page))[:, :, begin:end].flatten(0, 1)
        at = slice(first - begin * format.grain, last - begin * format.grain)
        both = format.read_grains(grains if self._is_open(page) else self._fetched(grains))
        return tuple(x.unflatten(0, (-1, self.shape.kv_heads))[:, :, at] for x in both)

    def _is_open(self, page: int) -> bool:
        """Whether it is on the device, in its open slot."""
        return self._open_pages[page % 2] == page

    def _source(self, page: int) -> Tensor:
        """`[layers, numbers]`, on the device if it is in its open slot, else in host memory."""
        return self.tiers.open[:, page % 2] if self._is_open(page) else self.tiers.pages[:, page]

    def _fetched(self, x: Tensor) -> Tensor:
        """What is in host memory, on the device: over the link."""
        tiers = self.tiers
        source = x.contiguous()
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        # The mark: the target's memory may be in use until now by what it was before.
        tiers.link.wait(ticket := tiers.link.copy([(target, source)], tiers.link.mark()))
        tiers.link.finish(ticket)
        return target

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        tiers, heads = self.tiers, self.shape.kv_heads
        away = rows >= tiers.resident_layers * heads
        found = self._gather_away(rows[away] - tiers.resident_layers * heads, chunks[away], size)
        if tiers.resident is None:
            return found
        near = tiers.resident.gather(rows[~away], chunks[~away], size)
        both = []
        for far, close in zip(found, near, strict=True):
            whole = torch.empty((len(rows), *far.shape[1:]), dtype=self.dtype, device=self.device)
            whole[away], whole[~away] = far, close
            both.append(whole)
        return tuple(both)

    def _gather_away(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        tiers, format = self.tiers, self.tiers.format
        rows, chunks = rows.cpu(), chunks.cpu()
        layer, head = (x.unsqueeze(1) for x in (rows // self.shape.kv_heads, rows % self.shape.kv_heads))
        tokens = chunks.unsqueeze(1) * size + torch.arange(0, size, format.grain)
        page, grain = tokens // self.span, tokens % self.span // format.grain
        picked = self._fetched(format.grains(tiers.pages)[layer, page, head, grain])
        numbers = torch.tensor([-1 if each is None else each for each in self._open_pages])
        here = (page == numbers[page % 2]).all(1).nonzero().squeeze(1)  # chunks never reach from one page to the next
        if len(here):
            at = [x.expand_as(page)[here].to(self.device) for x in (layer, page % 2, head, grain)]
            picked[here.to(self.device)] = format.grains(tiers.open)[tuple(at)]
        return format.read_grains(picked)

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        """See `Store`. Computed on the host, where the keys are."""
        tiers = self.tiers
        if layer < tiers.resident_layers:
            return tiers.resident.mean_keys(layer, start, end, chunk)
        means = []
        for page in range(start // self.span, -(-end // self.span)):
            base = page * self.span
            keys, _ = tiers.format.read(self._source(page)[layer - tiers.resident_layers].cpu())
            some = keys[:, max(start - base, 0) : min(end - base, self.span)]
            means.append(some.unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32))
        return torch.cat(means, dim=1).to(self.device)
