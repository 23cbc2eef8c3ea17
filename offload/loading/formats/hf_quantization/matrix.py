"""A quantised linear of a safetensors file, as all layouts give it: codes with scales, and maybe zero points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from ....errors import CheckpointError, UnsupportedModel
from ..checkpoint import Part, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ....kernels.quantized import QuantizedFormat, QuantizedTensor

HINT = "use the unquantised model, or a GGUF file of it"


class Values(NamedTuple):
    """A matrix as read: a weight is `scale * (level - zero)`.

    `codes` are `[rows, inputs]` as those of a `QuantizedTensor` whose levels are symmetric: with 4 bits uint8, level
    + 8. `scales` and `zeros` are `[rows, groups]`, fp32; zeros are None where all are 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


class Codes(NamedTuple):
    """How the weights of a matrix are coded.

    Args:
        size: rows and inputs.
        bits: of a code, 4 or 8.
        group: inputs that share a scale; all of them where a row has one scale. The last group may be shorter.
        has_zeros: whether there may be zero points that are not the codes' middle.
        is_float: whether the codes are e4m3 numbers.
    """

    size: tuple[int, int]
    bits: int
    group: int
    has_zeros: bool = False
    is_float: bool = False

    def format(self, has_minimum: bool) -> QuantizedFormat | None:
        """Return the kernel's format; None where scales do not belong to whole groups of 32 inputs."""
        from ....kernels.quantized import QuantizedFormat

        group = gcd(self.group, self.size[1], 128)
        if group % 32:
            return None
        middle = 1 << self.bits - 1
        levels = () if self.is_float else tuple(range(-middle, middle))
        name = "fp8" if self.is_float else f"int{self.bits}"
        return QuantizedFormat(name, self.bits, group, False, has_minimum, levels, wide=True)


@dataclass(frozen=True)
class QuantizedMatrix:
    """The quantised weight of a linear; `values` reads it. It is a `Weight`."""

    codes: Codes
    values: Callable[[], Values]
    is_quantized = True

    @property
    def size(self) -> tuple[int, int]:
        return self.codes.size

    @property
    def bits(self) -> float | None:
        kind = self.codes.format(self.codes.has_zeros)
        return None if kind is None else kind.bits_per_weight

    def read(self, part: Part | None = None) -> Tensor:
        """Return the weights in fp32: dequantised as a whole, and then sliced."""
        codes, scales, zeros = self.values()
        levels = levels_of(codes, 4) if self.codes.bits == 4 else codes.float()
        levels = levels if zeros is None else levels - self._widened(zeros)
        return (levels * self._widened(scales))[part or ...]

    def _widened(self, x: Tensor) -> Tensor:
        """Return the numbers of groups `[rows, groups]` for each input, `[rows, inputs]`."""
        return x.repeat_interleave(self.codes.group, 1)[:, : self.codes.size[1]]

    def quantized(self) -> QuantizedTensor | None:
        """Return the matrix as the kernel takes it; None if scales belong to parts of its groups, or weights are NaN.

        A product `scale * zero` has no more than the 24 bits of fp32, unless the scale is an fp32 number itself.
        """
        import torch

        from ....kernels.quantized import QuantizedTensor

        codes, scales, zeros = self.values()
        kind = self.codes.format(zeros is not None)
        if kind is None or (kind.is_float and bool((codes.view(torch.uint8) & 127 == 127).any())):
            return None
        count, each = self.size[1] // kind.group, self.codes.group // kind.group

        def repeated(x: Tensor) -> Tensor:
            return x.repeat_interleave(each, 1)[:, :count].contiguous()

        minima = None if zeros is None else repeated(-scales * zeros)
        return QuantizedTensor(kind, codes.unflatten(1, (-1, 32)), repeated(scales), minima)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in the bits of int32 numbers `[rows, n]`, the lowest first: uint8 `[rows, n * 32 / bits]`."""
    import torch

    data = packed.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def signed_codes(codes: Tensor, bits: int) -> Tensor:
    """Return unsigned codes as those of `Values`: with 8 bits the levels, int8."""
    import torch

    return (codes ^ 128).view(torch.int8) if bits == 8 else codes


def levels_of(codes: Tensor, bits: int) -> Tensor:
    """Return the levels of unsigned codes, fp32."""
    return codes.float() - (1 << bits - 1)


def with_zeros(codes: Tensor, scales: Tensor, zeros: Tensor) -> Values:
    """Return the values, without zero points if they all are 0; `zeros` broadcast to the size of `scales`."""
    return Values(codes, scales.float(), zeros.expand_as(scales) if zeros.any() else None)


def check_fits(name: str, weights: Mapping[str, Weight], *sizes: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor is there with one of some sizes."""
    found = weights[name].size if name in weights else None
    if found not in sizes:
        what = "is missing" if found is None else f"is {list(found)}, which does not fit the other tensors"
        raise CheckpointError(f"{name} {what}", "fetch the model again")


def check_order(name: str, weights: Mapping[str, Weight], inputs: int, group: int) -> None:
    """Raise UnsupportedModel if the inputs of a group are not neighbours: if they were sorted by activation."""
    if name in weights and group < inputs and weights[name].read().tolist() != [i // group for i in range(inputs)]:
        raise UnsupportedModel(
            f"groups of inputs sorted by activation (desc_act, actorder) are not supported: {name}",
            "use a model quantised without desc_act, or a GGUF file of it",
        )
