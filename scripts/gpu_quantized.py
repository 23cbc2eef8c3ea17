"""Measure linears with quantised weights on a GPU, and compare them with the weights dequantised by torch."""

from __future__ import annotations

import torch
from gpu_machine import Machine
from gpu_rows import Rows, Skipped
from torch import Tensor

from offload.architecture.weight_formats import FORMATS, QuantizedFormat
from offload.kernels import triton
from offload.kernels.quantized import QuantizedTensor
from offload.kernels.quantized_linear import QuantizedLinear
from offload.planning.roofline import Pass, pass_time, quantized_rows

ROWS = (1, 8, 33)
COPIES = 8  # of a weight, one after the other: a single one would stay in the GPU's second-level cache
MOST_ERROR = {1: 1e-4, triton.ROWS + 1: 2e-2}  # by rows: of sums in fp32, and of weights rounded to bf16
CHECKED = 512  # outputs at both ends


def every_format(machine: Machine, rows: Rows) -> dict:
    """Measure products with the formats of which random weights are made: not nested minima, and not MXFP4."""
    names = (name for name, kind in FORMATS.items() if not (kind.nested and kind.has_minimum) and name != "MXFP4")
    return quantized_linears(machine, rows, tuple(names))


def quantized_linears(machine: Machine, rows: Rows, formats: tuple[str, ...] = ("Q4_1", "Q6_K")) -> dict:
    """Measure products, by default with 4 bits with minima and 6 with nested scales; check what they compute."""
    if not machine.small and machine.dtype != torch.bfloat16:
        raise Skipped("the GPU has no bf16")
    outputs, inputs = (96, 256) if machine.small else (28672, 4096)  # gate and up of Llama-3.1-8B
    by_triton = triton.serves_quantized(machine.device)
    rows.add("kernel", "Triton" if by_triton else "torch", "" if by_triton else "Triton does not run here")
    for name in formats:
        linears, reference = [], None
        for copy in range(COPIES):
            weight = random_weight(FORMATS[name], outputs, inputs, machine.device, copy)
            linears.append(QuantizedLinear([weight]))
            reference = reference or weight
        _check(machine, rows, name, linears[0], reference)
        for count in ROWS:
            _time(machine, rows, name, linears, count, (outputs, inputs))
        del linears, reference
        machine.clear()
    return {"shape": [outputs, inputs]}


def random_weight(kind: QuantizedFormat, outputs: int, inputs: int, device: torch.device, seed: int) -> QuantizedTensor:
    """Return a weight with random codes and scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def integers(most: int, *size: int) -> Tensor:
        return torch.randint(0, most, size, generator=generator, device=device, dtype=torch.uint8)

    def halves(*size: int) -> Tensor:
        return (torch.rand(size, generator=generator, device=device) / 100).half()

    codes, groups = integers(2**kind.bits, outputs, inputs // 32, 32), inputs // 32
    if kind.nested:
        scales = integers(64, outputs, inputs // kind.group).view(torch.int8)
        return QuantizedTensor(kind, codes, scales, None, halves(outputs, inputs // 256))
    minima = -halves(outputs, groups) * 8 if kind.has_minimum else None
    return QuantizedTensor(kind, codes, halves(outputs, inputs // kind.group), minima)


def _rows(machine: Machine, count: int, inputs: int) -> Tensor:
    generator = torch.Generator(machine.device).manual_seed(1)
    return torch.randn((count, inputs), generator=generator, device=machine.device).bfloat16()


def _check(machine: Machine, rows: Rows, name: str, linear: QuantizedLinear, weight: QuantizedTensor) -> None:
    """Compare products of few and of many rows with torch's in fp64. Raises ArithmeticError if they differ."""
    outputs, inputs = weight.shape
    for count, most in MOST_ERROR.items():
        x = _rows(machine, count, inputs)
        found = linear.wide(x).double()
        for some in (slice(0, CHECKED), slice(max(outputs - CHECKED, 0), outputs)):
            expected = x.double() @ weight.rows(some).dequantized().double().T
            error = ((found[:, some] - expected).norm() / expected.norm()).item()
            if not error < most:
                raise ArithmeticError(f"{name}, {count} rows: an error of {error:.1e}, where {most:g} is allowed")
        rows.add(f"{name}, {count} rows", f"error {error:.1e}", f"allowed {most:g}")
    many, one = (linear.wide(_rows(machine, max(ROWS), inputs)[:count])[0] for count in (max(ROWS), 1))
    rows.add(f"{name}, a row alone and beside others", "same bits" if torch.equal(many, one) else "other bits")


def _time(
    machine: Machine, rows: Rows, name: str, linears: list[QuantizedLinear], count: int, size: tuple[int, int]
) -> None:
    x, numbers = _rows(machine, count, size[1]), size[0] * size[1]
    work = Pass(
        rows=count,
        layers=0,
        row_bytes=0,
        weights=numbers * FORMATS[name].bits_per_weight / 8,
        kv=0.0,
        copied=0.0,
        hosted=0.0,
        linear_flops=2 * numbers * quantized_rows(count),
        attention_flops=0.0,
        hosted_flops=0.0,
        graphed=True,
        quantized=True,
    )
    took = machine.seconds(lambda: [linear(x) for linear in linears], 5, 2) / len(linears)
    rows.compare(f"{name} of {size[0]} x {size[1]}, {count} rows", took, pass_time(work, machine.hardware).seconds)
