"""The layout of quantised weights in a GPU's memory: group by group, so that neighbouring outputs are read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..architecture.weight_formats import QuantizedFormat
from .quantized import Quantized, QuantizedTensor


@dataclass(frozen=True)
class DeviceWeight:
    """A quantised weight `[outputs, inputs]`, with the codes, scales and minima of a `QuantizedTensor`.

    Args:
        codes: `[inputs / 32, outputs, 16]`, uint8: byte i has the low four bits of code i in its low half, and those of
            code 16 + i in its high half. With 8 bits `[inputs / 32, outputs, 32]`, int8, which may stand for e4m3.
        scales: `[inputs / group, outputs]`, fp16, int8 or fp32.
        high: the codes' other bits, int32: with 5 bits `[inputs / 32, outputs]`, bit i belongs to code i; with 6 bits
            `[inputs / 16, outputs]`, bits 2 i and 2 i + 1 belong to code i of half a group. None otherwise.
        minima: `[inputs / minimum_group, outputs]` or None.
        factors, minimum_factors: `[inputs / 256, outputs]`, fp16, of nested scales and minima, or None.
        levels: `[16]` in fp32, or None where a level is its code plus the first level.
    """

    format: QuantizedFormat
    codes: Tensor
    scales: Tensor
    high: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None
    minimum_factors: Tensor | None = None
    levels: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs."""
        return self.codes.shape[1], 32 * len(self.codes)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold the weight, without None."""
        return [x for field in fields(self)[1:] if (x := getattr(self, field.name)) is not None]

    def over(self, tensors: Sequence[Tensor]) -> DeviceWeight:
        """Return this weight over other memory, `tensors` like those of `tensors()`."""
        names = [field.name for field in fields(self)[1:] if getattr(self, field.name) is not None]
        moved: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return replace(self, **moved)

    def unpacked(self, part: slice | Tensor) -> QuantizedTensor:
        """Return some of the outputs as they were before packing, with a byte for each code."""
        codes, bits = self.codes[:, part].transpose(0, 1), self.format.bits
        if self.format.is_float:
            codes = codes.view(torch.float8_e4m3fn)
        if bits < 8:
            codes = torch.cat((codes & 15, codes >> 4), dim=2)
        if self.high is not None:
            more = bits - 4
            words = self.high[:, part].T.reshape(-1, len(self.codes), more)
            shifts = torch.arange(0, 32, more, dtype=torch.int32, device=words.device)
            codes = codes | ((words.unsqueeze(-1) >> shifts & 2**more - 1) << 4).flatten(2).to(torch.uint8)
        others = (self.minima, self.factors, self.minimum_factors)
        numbers = (None if x is None else x[:, part].T for x in others)
        return QuantizedTensor(self.format, codes, self.scales[:, part].T, *numbers)


def pack_for_device(weights: Sequence[Quantized]) -> DeviceWeight:
    """Return weights of one format below each other, on the device where they are; no value is changed."""
    parts = [weight.split() for weight in weights]
    kind, device = parts[0].format, parts[0].codes.device
    is_table = kind.bits < 8 and not kind.is_even
    names = ("scales", "minima", "factors", "minimum_factors")
    return DeviceWeight(
        kind,
        _stacked([_low_bits(part) for part in parts]),
        high=_stacked([_high_bits(part) for part in parts]) if kind.bits in (5, 6) else None,
        levels=torch.tensor(kind.levels, dtype=torch.float32, device=device) if is_table else None,
        **{
            name: _stacked([getattr(part, name) for part in parts])
            for name in names
            if getattr(parts[0], name) is not None
        },
    )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return `[n, outputs, ...]` of parts `[outputs, n, ...]`, in newly allocated memory."""
    rows = [len(part) for part in parts]
    first = parts[0]
    whole = torch.empty((first.shape[1], sum(rows), *first.shape[2:]), dtype=first.dtype, device=first.device)
    for target, part in zip(whole.split(rows, dim=1), parts, strict=True):
        target.copy_(part.transpose(0, 1))
    return whole


def _low_bits(weight: QuantizedTensor) -> Tensor:
    codes = weight.codes
    if weight.format.is_float:
        return codes.view(torch.int8)
    if weight.format.bits == 8 or codes.shape[2] == 16:
        return codes
    return codes[..., :16] & 15 | codes[..., 16:] << 4


def _high_bits(weight: QuantizedTensor) -> Tensor:
    """Return the bits above the fourth of each group's codes as words `[outputs, n]`, the first code's lowest."""
    bits = weight.format.bits - 4
    digits = (weight.codes >> 4).unflatten(2, (-1, 8 // bits))
    joined = torch.zeros(digits.shape[:-1], dtype=torch.uint8, device=digits.device)
    for index in range(8 // bits):  # in bytes: any wider type would take as much memory as the weight in fp32
        joined |= digits[..., index] << bits * index
    return joined.view(torch.int32).flatten(1)
