"""Finds each expert's matrices in tensors of safetensors files that have those of all experts.

Imports no torch until quantised ones are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...architecture.families import Family
from ...architecture.weight_formats import FORMATS
from ...errors import CheckpointError
from .checkpoint import Part, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.quantized import QuantizedTensor

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+?)(_blocks)?")
_GROUP = 32  # weights of MXFP4 that share a scale


@dataclass(frozen=True)
class ExpertWeight:
    """A matrix or bias of one expert: every `step`-th row from `start` of its part of `tensor`, `[experts, ...]`.

    The part has rows of inputs where it `is_transposed`. Codes of MXFP4 have their `scales` in another tensor. It is a
    `Weight`.
    """

    size: tuple[int, ...]
    tensor: Weight
    scales: Weight | None
    expert: int
    start: int
    step: int
    is_transposed: bool

    @property
    def is_quantized(self) -> bool:
        return self.scales is not None

    @property
    def bits(self) -> float | None:
        return None if self.scales is None else FORMATS["MXFP4"].bits_per_weight

    def read(self, part: Part | None = None) -> Tensor:
        if (quantized := self.quantized()) is not None:
            return quantized.dequantized()[part or ...]
        rows, *columns = part or (slice(None),)
        start, end, _ = rows.indices(self.size[0])
        some = slice(self.start + self.step * start, self.start + self.step * end, self.step)
        if self.is_transposed or self.step > 1:  # files are not read by steps
            whole = self._of_expert(self.tensor)
            return (whole.T if self.is_transposed else whole)[(some, *columns)]
        return self.tensor.read((slice(self.expert, self.expert + 1), some, *columns))[0]

    def _of_expert(self, tensor: Weight) -> Tensor:
        return tensor.read((slice(self.expert, self.expert + 1),))[0]

    def quantized(self) -> QuantizedTensor | None:
        """Return an MXFP4 matrix: byte i of a group has code 2 i in its low half, and code 2 i + 1 in its high half."""
        if self.scales is None:
            return None
        import torch

        from .gguf_blocks import with_powers

        some = slice(self.start, self.start + self.step * self.size[0], self.step)
        packed, exponents = (self._of_expert(tensor)[some] for tensor in (self.tensor, self.scales))
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        return with_powers(FORMATS["MXFP4"], codes, exponents)


def expert_weights(family: Family, stored: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the weights with each expert's in place of the tensors of all experts. Raises CheckpointError."""
    found, scales = dict[str, Weight](), set[str]()
    for name, weight in stored.items():
        match = _LAYER.fullmatch(name)
        if match is None or match[2] not in family.stacked:
            found[name] = weight
            continue
        names = [f"{match[1]}{each}" for each in family.stacked[match[2]]]
        exponents = None
        if match[3]:
            scales.add(f"{name.removesuffix('_blocks')}_scales")
            exponents = stored.get(f"{name.removesuffix('_blocks')}_scales")
            if exponents is None or weight.size != (*exponents.size, _GROUP // 2):
                raise CheckpointError(f"{name} and its scales are not MXFP4", "fetch the model again")
        found |= dict(_experts(family, name, weight, exponents, names))
    return {name: weight for name, weight in found.items() if name not in scales}


def _experts(
    family: Family, name: str, weight: Weight, scales: Weight | None, names: Sequence[str]
) -> Iterator[tuple[str, ExpertWeight]]:
    """Yield the parts of one tensor: for each expert those that `names` call."""
    is_transposed = family.transposes_experts and len(weight.size) == 3
    axes = 4 if scales is not None else 2 if names[0].endswith(".bias") else 3
    experts, *size = weight.size if len(weight.size) == axes else (0, 1)
    if is_transposed:
        size.reverse()
    if size[0] % len(names) or not experts:
        wanted = f"a list of matrices with rows for {len(names)}"
        raise CheckpointError(f"{name} is {list(weight.size)}, not {wanted}", "fetch the model again")
    rows, columns = size[0] // len(names), size[1:] if scales is None else [_GROUP * size[1]]
    step = len(names) if family.interleaves_experts else 1
    for expert in range(experts):
        for number, each in enumerate(names):
            start = number if step > 1 else number * rows
            part = ExpertWeight((rows, *columns), weight, scales, expert, start, step, is_transposed)
            yield each.replace("*", str(expert)), part
