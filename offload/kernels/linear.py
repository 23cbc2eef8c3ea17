"""Linears by torch, for machines and dtypes that the native kernel does not serve.

bf16 and fp16 halve the bytes that decoding reads, but a CPU without matrix instructions for them multiplies several
rows many times slower than in fp32. On such a CPU more than a few rows are multiplied with an fp32 copy of the weight
that exists for one product only. For the few rows of a verification the copy is made block by block, and the rows are
the short side of the product: MKL has a fast kernel for 16 rows there, so fewer rows are padded with zeros. Measured on
an AVX2 machine with 2 cores, all linears of a model with 106 million weights: 16 rows take 47 ms this way, 180 ms in
bf16 and 115 ms as a plain fp32 product; one row in bf16 takes 13 ms.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

UPCAST_ROWS = 7  # from this many rows the fp32 copy is faster; below, reading half the bytes is
_SHORT_SIDE = 16
_WIDE_ROWS = 64  # from this many rows the plain fp32 product is as fast
_BLOCK = 2**21  # elements of a weight that are copied at once: 8 MB in fp32, about a cache


@cache
def multiplies_natively(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether large products in `dtype` run at least as fast as in fp32."""
    if device_type != "cpu" or dtype == torch.float32:
        return True
    if dtype != torch.bfloat16:
        return False
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


class TorchLinear:
    """A linear by torch; see `Linear` in ops.py."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._native = multiplies_natively(weight.device.type, weight.dtype)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if onto is None:
            return self._product(x)
        if onto.device.type == "cuda" and self._bias is None:  # one launch, and no copy of the residual
            return onto.addmm_(x, self._weight.t())
        return onto + self._product(x)

    def wide(self, x: Tensor) -> Tensor:
        return self._product(x).float()

    def into(self, x: Tensor, y: Tensor) -> None:
        y.copy_(self._product(x))

    @property
    def outputs(self) -> int:
        return len(self._weight)

    @property
    def formats(self) -> tuple[()]:
        return ()

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids]

    def tensors(self) -> list[Tensor]:
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def over(self, tensors: list[Tensor]) -> TorchLinear:
        return TorchLinear(*tensors)

    def _product(self, x: Tensor) -> Tensor:
        if self._native or x.shape[0] < UPCAST_ROWS:
            return F.linear(x, self._weight, self._bias)
        if x.shape[0] < _WIDE_ROWS:
            return self._few_rows(x)
        bias = None if self._bias is None else self._bias.float()
        return F.linear(x.float(), self._weight.float(), bias).to(x.dtype)

    def _few_rows(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        side = max(rows, _SHORT_SIDE)
        columns = F.pad(x.float(), (0, 0, 0, side - rows)).T  # [in, side]
        out = torch.empty((len(self._weight), side), dtype=torch.float32)
        size = max(1, _BLOCK // width)
        copy = _scratch_buffer(size * width)
        for block, target in zip(self._weight.split(size), out.split(size), strict=True):
            upcast = copy[: block.numel()].view(block.shape).copy_(block)
            torch.mm(upcast, columns, out=target)
        y = out[:, :rows].T
        return (y if self._bias is None else y + self._bias.float()).to(x.dtype, memory_format=torch.contiguous_format)


_local = threading.local()


def _scratch_buffer(elements: int) -> Tensor:
    """Return this thread's scratch memory of at least `elements` fp32; a fresh allocation costs page faults."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < elements:
        with torch.inference_mode(False):  # an inference tensor could not be used outside that mode
            buffer = _local.buffer = torch.empty(elements, dtype=torch.float32)
    return buffer
