"""Quantised weights: codes of 4 to 8 bits, with a scale and maybe a minimum for each group of a row.

A weight is `scale * level + minimum`, where the level of a code is a small whole number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..architecture.weight_formats import BLOCK_GROUPS, QuantizedFormat


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantised matrix `[rows, inputs]`, as files have it.

    Args:
        codes: `[rows, inputs / 32, 32]`, uint8; with 8 bits int8 or float8_e4m3fn, and the codes are the levels. Or, as
            GGUF files have 4 bits, `[rows, inputs / 32, 16]`: byte i has code i in its low half and code 16 + i in its
            high half. Any strides with a contiguous last axis. No code is NaN.
        scales: `[rows, inputs / group]`, fp16, or int8 where they are nested, or fp32 where they are wide.
        minima: `[rows, inputs / minimum_group]` likewise, or None.
        factors: `[rows, inputs / 256]` fp16, of nested scales, or None.
        minimum_factors: likewise, of nested minima.
    """

    format: QuantizedFormat
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    factors: Tensor | None = None
    minimum_factors: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and inputs."""
        return len(self.codes), 32 * self.codes.shape[1]

    def split(self) -> QuantizedTensor:
        return self

    def to(self, device: torch.device) -> QuantizedTensor:
        return replace(self, **{name: x.to(device) for name, x in self._tensors().items()})

    def rows(self, part: slice | Tensor) -> QuantizedTensor:
        return replace(self, **{name: x[part] for name, x in self._tensors().items()})

    def columns(self, part: slice) -> QuantizedTensor | None:
        """Return some of the columns, or None if a group or a block of nested scales would be cut."""
        inputs = self.shape[1]
        start, end, _ = part.indices(inputs)
        if start % self.format.block or end % self.format.block:
            cut = gcd(start, end)
            return None if cut % 32 or not self.format.wide else self._regrouped(gcd(cut, 128)).columns(part)
        parts = {name: (x, x.shape[1]) for name, x in self._tensors().items()}
        return replace(self, **{name: x[:, start * n // inputs : end * n // inputs] for name, (x, n) in parts.items()})

    def _regrouped(self, group: int) -> QuantizedTensor:
        """Return the matrix with wide scales of fewer inputs, which are repeated."""
        names = [name for name in ("scales", "minima") if getattr(self, name) is not None]
        numbers: dict[str, Any] = {
            name: getattr(self, name).repeat_interleave(self.format.group // group, 1) for name in names
        }
        return replace(self, format=replace(self.format, group=group), **numbers)

    def _tensors(self) -> dict[str, Any]:
        names = ("codes", "scales", "minima", "factors", "minimum_factors")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def dequantized(self) -> Tensor:
        """Return the weights `[rows, inputs]` in fp32."""
        scales = _widened(self.scales, self.factors, 256 // self.format.group)
        values = self._levels().unflatten(1, (-1, self.format.group)) * scales.unsqueeze(-1)
        if self.minima is None:
            return values.flatten(1)
        minima = _widened(self.minima, self.minimum_factors, BLOCK_GROUPS)
        return (values.flatten(1).unflatten(1, (-1, self.format.minimum_group)) + minima.unsqueeze(-1)).flatten(1)

    def _levels(self) -> Tensor:
        if self.format.bits == 8:
            return self.codes.flatten(1).float()
        codes = self.codes if self.codes.shape[2] == 32 else torch.cat((self.codes & 15, self.codes >> 4), dim=2)
        if self.format.is_even:
            return codes.flatten(1).float() + self.format.levels[0]
        return torch.tensor(self.format.levels, dtype=torch.float32, device=codes.device)[codes.flatten(1).int()]


@dataclass(frozen=True)
class StoredBlocks:
    """A quantised matrix as the blocks of a GGUF file, which the native kernel packs as they are.

    Args:
        blocks: `[rows, bytes]` uint8, which may be a mapped file.
        splitter: returns the codes and numbers of blocks.
    """

    format: QuantizedFormat
    blocks: Tensor
    inputs: int
    splitter: Callable[[Tensor], QuantizedTensor]

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and inputs."""
        return len(self.blocks), self.inputs

    def split(self) -> QuantizedTensor:
        return self.splitter(self.blocks)

    def to(self, device: torch.device) -> Quantized:
        return self if device.type == "cpu" else self.split().to(device)

    def rows(self, part: slice | Tensor) -> StoredBlocks:
        return replace(self, blocks=self.blocks[part])

    def columns(self, part: slice) -> QuantizedTensor | None:
        return self.split().columns(part)


Quantized = QuantizedTensor | StoredBlocks


def neighbours(
    weights: Sequence[Quantized | Tensor], continues: Callable[[Quantized, Quantized], bool]
) -> Iterator[list[Quantized] | Tensor]:
    """Yield weights in their order: plain ones, and runs of quantised ones of which each `continues` the one before."""
    run: list[Quantized] = []
    for weight in weights:
        if run and (isinstance(weight, Tensor) or not continues(run[-1], weight)):
            yield run
            run = []
        if isinstance(weight, Tensor):
            yield weight
        else:
            run.append(weight)
    if run:
        yield run


def _widened(numbers: Tensor, factors: Tensor | None, each: int) -> Tensor:
    """Return scales or minima in fp32, with the outer factor of every `each` of them applied."""
    return numbers.float() if factors is None else factors.float().repeat_interleave(each, 1) * numbers.float()
