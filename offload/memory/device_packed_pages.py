"""Packed pages over a GPU's tiers: packed as they leave the device, and attended to by Triton as they arrive."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.pages import PACKED_BYTES
from ..kernels import triton
from ..kernels.accumulate import Accumulator, TorchAccumulator
from ..kernels.triton.accumulate import PackedAccumulator, attend_packed_before
from ..kernels.triton.ops import pack_runs, unpack_runs
from .packed_pages import PackedPageFormat
from .page import BlockPageFormat


class DevicePackedPageFormat(BlockPageFormat):
    """Blocks in pages as they are, of bf16; and packed ones, in bytes, as of the format `host` in host memory.

    Triton's attention to them has the bits of that to blocks. For a pass of more rows they are unpacked first.
    """

    def __init__(self, host: PackedPageFormat, shape: ModelShape, device: torch.device) -> None:
        super().__init__(shape, host.tokens, host.kernel)
        self._host, self.runs = host, host.runs
        self.page_bytes, self.plain_bytes = host.page_bytes, host.plain_bytes
        heads, count, _ = self.runs
        with torch.inference_mode(False):
            self._rows = torch.arange(heads, device=device)
            self._places = (~torch.arange(count, dtype=torch.int32)).repeat(heads, 1).to(device)
            self._drafted = self._places[:, :0]
            self._none = torch.empty((heads, 1, shape.head_dim), dtype=torch.bfloat16, device=device)

    @property
    def host(self) -> PackedPageFormat:
        return self._host

    def accumulator(self, q: Tensor) -> Accumulator:
        if len(q) > triton.ROWS:
            return TorchAccumulator(q, self.attend)
        return PackedAccumulator(q, self._size[0], lambda page: self._blocks(page.view(torch.bfloat16)), self._memory)

    def attend(self, page: Tensor, q: Tensor, seen: int, causal: bool = False) -> Any:
        if page.dim() == 1:
            return super().attend(self.plain(page), q, seen, causal)
        return attend_packed_before(q, self._planes(page), seen)

    def drafted(self, planes: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield arguments of `attend` for planes A of pages `[n, kv_heads, runs, bytes]`: all of them in one launch."""
        if len(planes):
            yield planes, self.tokens * len(planes)

    def _memory(self, page: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return a packed page, or planes A, as `attend_runs` takes it; None for a page that is not packed."""
        if page.dim() > 1:
            return self._planes(page)
        if page.nbytes == self.plain_bytes:
            return None
        return self._host.runs_of(page), self._places, self._none, self._none

    def _planes(self, planes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return planes A as `attend_runs` takes them: the runs of all heads, for each, and where its own ones lie."""
        pages, heads, count, _ = planes.shape
        if self._drafted.shape[1] < pages * count:
            with torch.inference_mode(False):
                page, head, run = torch.meshgrid(*map(torch.arange, (2 * pages, heads, count)), indexing="ij")
                places = ~((page * heads + head) * count + run).transpose(0, 1).flatten(1)
                self._drafted = places.to(torch.int32).to(self._rows.device)
        return planes.flatten(0, 2).expand(heads, -1, -1), self._drafted, self._none, self._none

    def plain(self, arrived: Tensor) -> Tensor:
        if arrived.nbytes == self.plain_bytes:
            return arrived.view(torch.bfloat16)
        page = torch.empty(self.numbers, dtype=torch.bfloat16, device=arrived.device)
        self.unpack(arrived, page)
        return page

    def unpack(self, source: Tensor, page: Tensor) -> None:
        """Unpack the bytes of a page, or copy them if they are not packed."""
        if (memory := self._memory(source)) is None:
            page.copy_(source.view(page.dtype))
        else:
            keys, values = unpack_runs(memory, self._rows, self._rows * 0, self.tokens)
            assert values is not None
            self.write(page, 0, keys, values)

    def pack(self, pages: Tensor) -> tuple[Tensor, list[bool]]:
        """Return packed pages `[n, bytes]`, and which of them could be packed, for which the host waits."""
        heads, count, nbytes = self.runs
        packed = torch.empty((len(pages), self.page_bytes), dtype=torch.uint8, device=pages.device)
        fits = []
        step = max(PACKED_BYTES // self.plain_bytes, 1)
        for some, to in zip(pages.split(step), packed.split(step), strict=True):
            keys, values = (x.contiguous() for x in self.read_parts(self.parts(some).flatten(0, 1)))
            runs = torch.empty((len(some) * heads, count, nbytes), dtype=torch.uint8, device=pages.device)
            fits.append(pack_runs(keys, values, runs, 0, count, count).view(len(some), -1))
            to[:, : heads * count * nbytes] = runs.view(len(some), -1)
        return packed, torch.cat(fits).bool().all(1).tolist()
