"""Linears by torch, for machines and dtypes that the native kernel does not serve.

bf16 and fp16 halve the bytes that decoding reads, but a CPU without matrix instructions for them multiplies several
rows many times slower than in fp32. There, more than a few rows are multiplied with an fp32 copy of the weight.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

UPCAST_ROWS = 7  # from this many rows the fp32 copy is faster; below, reading half the bytes is


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
        bias = None if self._bias is None else self._bias.float()
        return F.linear(x.float(), self._weight.float(), bias).to(x.dtype)
