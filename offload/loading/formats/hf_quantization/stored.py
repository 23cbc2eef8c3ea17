"""What the layouts of quantised linears have in common: the contract, the descriptions, and checks of headers.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ....errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

    from ....kernels.quantized import QuantizedFormat

HINT = "use the unquantised model, or a GGUF file of it"


class Header(NamedTuple):
    """A tensor's dtype, by safetensors' name, and its size."""

    dtype: str
    size: tuple[int, ...]


Headers = Mapping[str, Header]
ReadSmall = Callable[[str], Any]  # a tensor as a numpy array


@dataclass(frozen=True)
class StoredMatrix:
    """The quantised weight of the linear `stem`.

    Args:
        size: rows and inputs.
        bits: of a code, 4 or 8.
        group: inputs that share a scale; all of them where a row has one scale. The last group may be shorter.
        has_zeros: whether there may be zero points that are not the codes' middle.
        is_float: whether the codes are e4m3 numbers.
        codes, scales: the names of their tensors, where a layout has several.
    """

    stem: str
    size: tuple[int, int]
    bits: int
    group: int
    has_zeros: bool = False
    is_float: bool = False
    codes: str = ""
    scales: str = ""

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


class Values(NamedTuple):
    """A matrix as read: a weight is `scale * (level - zero)`.

    `codes` are `[rows, inputs]` as those of a `QuantizedTensor` whose levels are symmetric: with 4 bits uint8, level
    + 8. `scales` and `zeros` are `[rows, groups]`, fp32; zeros are None where all are 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


class Layout(Protocol):
    """How a library stores quantised linears."""

    def matrices(self, headers: Headers, read: ReadSmall) -> Iterable[StoredMatrix]:
        """Yield the quantised weights among the tensors. Raises CheckpointError, UnsupportedModel."""

    def read(self, matrix: StoredMatrix, tensor: Callable[[str], Tensor]) -> Values:
        """Read one of them; `tensor` reads a tensor by its name."""


def stems(headers: Headers, ending: str, dtype: str) -> list[str]:
    """Return the names before `ending` of the tensors that have a dtype."""
    return [
        name.removesuffix(ending) for name, header in headers.items() if name.endswith(ending) and header.dtype == dtype
    ]


def check_fits(name: str, headers: Headers, *sizes: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor is there with one of some sizes."""
    found = headers[name].size if name in headers else None
    if found not in sizes:
        what = "is missing" if found is None else f"is {list(found)}, which does not fit the other tensors"
        raise CheckpointError(f"{name} {what}", "fetch the model again")


def check_order(headers: Headers, read: ReadSmall, name: str, inputs: int, group: int) -> None:
    """Raise UnsupportedModel if the inputs of a group are not neighbours: if they were sorted by activation."""
    if name in headers and group < inputs and read(name).tolist() != [i // group for i in range(inputs)]:
        raise UnsupportedModel(
            f"groups of inputs sorted by activation (desc_act, actorder) are not supported: {name}",
            "use a model quantised without desc_act, or a GGUF file of it",
        )
