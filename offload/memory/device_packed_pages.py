"""Packed pages over a GPU's tiers: packed as they leave the device, and attended to by Triton as they arrive."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.tier_footprint import PACKED_BYTES
from ..kernels import triton
from ..kernels.accumulate import Accumulator, TorchAccumulator
from ..kernels.triton.accumulate import PackedAccumulator
from ..kernels.triton.packed_ops import pack_runs, unpack_runs
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
            self._none = torch.empty((heads, 1, shape.head_dim), dtype=torch.bfloat16, device=device)

    @property
    def host(self) -> PackedPageFormat:
        return self._host

    def accumulator(self, q: Tensor) -> Accumulator:
        if len(q) > triton.ROWS:
            return TorchAccumulator(q, self.attend)
        blocks = lambda page: (*[page.view(torch.bfloat16).view(self._size)] * 2, triton.BLOCKS)  # noqa: E731
        return PackedAccumulator(q, self._size[0], blocks, self._memory)

    def attend(self, page: Tensor, q: Tensor, seen: int, causal: bool = False) -> Tensor:
        return super().attend(self.plain(page), q, seen, causal)

    def _memory(self, page: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return a packed page as `attend_runs` takes it, None for one that is not packed."""
        if page.nbytes == self.plain_bytes:
            return None
        return self._host.runs_of(page), self._places, self._none, self._none

    def plain(self, page: Tensor) -> Tensor:
        """Return a page as it is, from its bytes as they arrived."""
        if page.nbytes == self.plain_bytes:
            return page.view(torch.bfloat16)
        plain = torch.empty(self.numbers, dtype=torch.bfloat16, device=page.device)
        self.unpack(page, plain)
        return plain

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
            keys, values = (x.contiguous() for x in self.read_grains(self.grains(some).flatten(0, 1)))
            runs = torch.empty((len(some) * heads, count, nbytes), dtype=torch.uint8, device=pages.device)
            fits.append(pack_runs(keys, values, runs, 0, count, count).view(len(some), -1))
            to[:, : heads * count * nbytes] = runs.view(len(some), -1)
        return packed, torch.cat(fits).bool().all(1).tolist()
