"""Attention on the host of a GPU over pages of quantised keys and values."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK
from ..kernels.accumulate import Accumulator, KernelAccumulator, TorchAccumulator
from ..kernels.attention import Partial, attend
from ..kernels.kv_groups import dequantize_groups
from ..kernels.native import Kernel
from ..kernels.native.calls import BlockCalls, partial_count
from .host_attention import HostResult, HostThread
from .quantized_pages import QuantizedPageFormat


class QuantizedHostAttention(HostThread):
    """Attends to whole pages but the sink, which is on the device, by the native kernel; without one, by torch."""

    def __init__(
        self,
        format: QuantizedPageFormat,
        shape: ModelShape,
        kernel: Kernel | None,
        device: torch.device,
        bandwidth: float | None = None,
    ) -> None:
        super().__init__(device, bandwidth)
        self._format, self._shape, self._kernel = format, shape, kernel
        self._calls = BlockCalls(shape, 1)

    def submit(self, pages: Tensor, first: int, q: Tensor) -> Future[HostResult]:
        copy, arrived = (q, None) if q.device.type == "cpu" else self._copied(q)

        def state() -> Tensor:
            found = self._summed(pages, first, copy)
            return found if arrived is None else found.pin_memory()

        return self._submit(pages, lambda: ([], state()), arrived)

    def _summed(self, pages: Tensor, first: int, q: Tensor) -> Tensor:
        """Return the state of attention to all the pages."""
        result: Accumulator = (
            TorchAccumulator(q, attend) if self._kernel is None else KernelAccumulator(self._kernel, q)
        )
        for number, page in enumerate(pages, first):
            from_group = SINK // GROUP if number == 0 else 0
            part = self._by_torch(page, q, from_group) if self._kernel is None else self._natively(page, q, from_group)
            result.add(slice(0, len(q)), part)
        return result.state()

    def _by_torch(self, page: Tensor, q: Tensor, first: int) -> Partial:
        groups = self._format.grains(page)[:, first:]
        keys, values = dequantize_groups(groups, self._shape.head_dim, self._format.kind, q.dtype)
        return attend(q, keys.flatten(1, 2), values.flatten(1, 2))

    def _natively(self, page: Tensor, q: Tensor, first: int) -> Tensor:
        seen = self._format.tokens - first * GROUP
        partials = torch.empty((partial_count(seen, len(q), False), *q.shape[:2], 2 + q.shape[2]), dtype=torch.float32)
        none = torch.empty((self._shape.kv_heads, 1, 2 * BLOCK * self._shape.head_dim), dtype=q.dtype)
        table = self._format.whole_table(1)[:, first * GROUP // BLOCK :]
        groups = self._format.groups(page.unsqueeze(0))
        call = self._calls.attention(none, q, seen, False, table=table, partials=partials, groups=groups)
        self._kernel.attend(call)
        return partials
