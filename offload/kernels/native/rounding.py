"""Rounds weights to 4, 5, 6 or 8 bits in the kernel, in the bits of offload/loading/formats/quantization.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantized import QuantizedFormat, QuantizedTensor
from .checks import require
from .kernel import Kernel
from .library import Rounding

REFITS = 2  # least-squares fits: each next one gains half as much as the last one


def round_weight(kernel: Kernel, weight: Tensor, kind: QuantizedFormat) -> QuantizedTensor | None:
    """Round a matrix `[rows, inputs]` to Q4_1, Q5_1, Q6_K or Q8_0; its inputs are whole blocks of the format.

    Returns None for weights that are not finite or too large for fp16 scales.
    """
    if weight.dtype != torch.bfloat16:
        weight = weight.float()
    weight, (rows, inputs) = weight.contiguous(), weight.shape
    require(kind.bits in (4, 5, 6, 8) and not kind.wide and inputs % kind.block == 0, "no whole blocks of the format")
    codes = torch.empty((rows, inputs // 32, 32), dtype=torch.int8 if kind.bits == 8 else torch.uint8)
    scales = torch.empty((rows, inputs // kind.group), dtype=torch.int8 if kind.nested else torch.float16)
    halves = torch.empty((rows, inputs // kind.block), dtype=torch.float16)  # minima, or factors
    call = Rounding(
        weight=weight.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        minima=halves.data_ptr(),
        groups=halves.numel(),
        bits=kind.bits,
        wide=weight.dtype == torch.float32,
        fits=1 + REFITS,
    )
    if not kernel.round(call):
        return None
    return QuantizedTensor(
        kind, codes, scales, halves if kind.has_minimum else None, factors=halves if kind.nested else None
    )
