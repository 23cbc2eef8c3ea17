"""Packed pages in two planes: A, 8 of their 12 bits, is on the device; B is in host memory, and streamed.

A draft attends to plane A of all whole pages. A verification joins both, page by page as B arrives, to what a page was.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..settings.kv_formats import PLANE_KV
from .host_memory import new_pages
from .packed_pages import PackedFormat, PackedPages
from .tiered_store import TieredStore
from .tree_attention import Tree


def plane_b_bytes(format: PackedFormat, head_dim: int) -> int:
    """Return the bytes of a page's plane B."""
    heads, runs, nbytes = format.runs
    return heads * runs * (nbytes - PLANE_KV.run_bytes(head_dim))


class PlanePages(PackedPages):
    """Packed pages whose planes A are on the device; what travels is plane B.

    A page that cannot be packed travels as it is. Its plane A lacks a few numbers, and is a draft like others.
    """

    def __init__(self, format: PackedFormat, stored: Tensor, device: torch.device) -> None:
        """`stored` `[layers, pages, bytes]` is the memory of planes B."""
        super().__init__(format, stored)
        heads, runs, nbytes = format.runs
        self._each = nbytes - stored.shape[2] // (heads * runs)  # bytes of a run, with what is before the planes
        self.planes = new_pages((*stored.shape[:2], heads, runs, self._each), torch.uint8, device)
        self._scratch: dict[torch.device, Tensor] = {}  # what pages are joined in: those read last

    def joined(self, key: tuple[int, int], source: Tensor) -> Tensor:
        if source.nbytes == self.format.plain_bytes:
            return source
        return self._whole(self.planes[key].unsqueeze(0), source.unsqueeze(0)).flatten()

    def arrived(self, layer: int, run: slice, buffer: Tensor) -> Iterator[Tensor]:
        """Yield pages as `PackedPages.arrived`; each is valid until the next one, or that of another call."""
        numbers = range(self.shape[1])[run]
        if buffer.device.type == "cpu" or any((layer, number) in self._plain for number in numbers):
            yield from super().arrived(layer, run, buffer)  # one by one, in a processor's cache
        else:  # in few launches
            yield from self._whole(self.planes[layer, run], buffer[: len(numbers), : self.shape[2]]).flatten(1)

    def _whole(self, planes: Tensor, rest: Tensor) -> Tensor:
        """Return packed pages `[n, kv_heads, runs, bytes]` from their planes A and B, in memory that is used again."""
        if len(self._scratch.get(rest.device, ())) < len(rest):
            self._scratch[rest.device] = new_pages((len(rest), *self.format.runs), torch.uint8, rest.device)
        whole = self._scratch[rest.device][: len(rest)]
        whole[..., : self._each] = planes
        whole[..., self._each :] = rest.unflatten(1, (*whole.shape[1:3], -1))
        return whole

    def divided(self, key: tuple[int, int], packed: Tensor) -> Tensor:
        runs = packed[: self.stored.shape[2] + self.planes[key].nbytes].view(self.format.runs)
        self.planes[key] = runs[..., : self._each]
        return runs[..., self._each :].flatten()

    def runs_at(self, pages: Tensor, at: Tensor) -> Tensor:
        heads, runs, _ = self.format.runs
        assert isinstance(self.stored, Tensor)
        first = self.planes.flatten(0, 1).flatten(1, 2)[pages.to(self.planes.device), at.to(self.planes.device)]
        rest = self.stored.flatten(0, 1).unflatten(1, (heads * runs, -1))[pages, at]
        return torch.cat((first.cpu(), rest), dim=1)


class PlaneStore(TieredStore):
    """Pages in two planes over tiers; all of them are streamed.

    Drafted tokens are in the open pages, behind the committed ones, until a verification writes over them.
    """

    @property
    def has_planes(self) -> bool:
        return True

    def open_draft(self, start: int, end: int) -> None:
        tiers = self.tiers
        tiers.recover()
        tiers.truncate(start)
        self._prefill = self._plain_prefill = None  # of an aborted pass
        tiers.num_whole = start // self.page_tokens
        tiers.open_pages.advance(start, end - start)
        for page, _, _ in tiers.split(start, end):
            tiers.open_pages.open(page)

    def attend_plane(
        self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        pages, result, rows = self.tiers.pages, self.format.accumulator(q), slice(0, len(q))
        assert isinstance(pages, PlanePages)
        for page, tokens in pages.format.drafted(pages.planes[layer, : self.tiers.num_whole]):
            result.attend(page, rows, tokens)
        self._attend_newest(layer, start, q, tree, result)
        return result.output(lse)
