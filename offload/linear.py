"""How a weight is multiplied on this machine; the model does not know.

bf16 and fp16 halve the bytes that decoding reads, but a CPU without matrix instructions for them multiplies many rows
several times slower than in fp32. There, blocks of rows are multiplied with a copy of the weight in fp32 that lives
for one product. Measured on an AVX2 machine (2 cores): 18 GFLOP/s in bf16 and 140 in fp32 at 512 rows; the copy
costs 5 %.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

UPCAST_ROWS = 16  # from here on the copy pays; below, reading half the bytes does


@cache
def multiplies_natively(device_type: str, dtype: torch.dtype) -> bool:
    """Whether large products in `dtype` run at least as fast as in fp32."""
    if device_type != "cpu" or dtype == torch.float32:
        return True
    if dtype != torch.bfloat16:
        return False
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


class Linear:
    """`y = x W^T + b` with W `[out, in]`; x is `[tokens, in]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._native = multiplies_natively(weight.device.type, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._native or x.shape[0] < UPCAST_ROWS:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
