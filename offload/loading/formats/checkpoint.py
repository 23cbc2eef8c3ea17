"""What all file formats have in common: a checkpoint is a model's shape and its weights by name. Imports no torch."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...architecture.config import ModelShape
from ...architecture.weight_formats import QuantizedFormat, format_of

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from ...kernels.quantized import Quantized, QuantizedTensor
    from ..tokenizers.tokenizer import Tokenizer

Part = tuple[slice, ...]  # of a tensor: some rows, or all rows and some columns


class Weight(Protocol):
    """A tensor of a checkpoint, known by its header."""

    @property
    def size(self) -> tuple[int, ...]:
        """Return the size of the tensor that `read` returns."""

    @property
    def bits(self) -> float | None:
        """Return the bits of a weight of the tensor of `quantized`, scales included; None where that is None."""

    @property
    def is_quantized(self) -> bool:
        """Return whether the file stores fewer bits than a floating-point number has."""

    def read(self, part: Part | None = None) -> Tensor:
        """Return the tensor on the CPU, in its stored dtype, or dequantised in fp32.

        With `part`, slices of rows and columns, only that part is read where the format allows it.
        """

    def quantized(self) -> Quantized | None:
        """Return the matrix as it is stored; None for floating point and formats that the kernels do not read."""


Weights = Mapping[str, Weight]  # by transformers' names


class Checkpoint(ABC):
    """A model's shape, tokenizer and weights.

    Attributes:
        generation: generation_config.json, or {}.
        quantization: what decides, besides the files of weights, which values quantised weights have; "" for nothing.
        level: to which q4, q5, q6 or q8 weights in floating point are rounded as they are read; None: they are not.
    """

    path: Path
    shape: ModelShape
    generation: dict[str, Any]
    quantization: str = ""
    level: str | None = None

    @property
    @abstractmethod
    def stored_weights(self) -> Weights:
        """Return the weights of the files, from their headers. Raises CheckpointError, UnsupportedModel."""

    @cached_property
    def weights(self) -> Weights:
        """The weights as they are loaded. Raises CheckpointError, UnsupportedModel."""
        if self.level is None:
            return self.stored_weights
        return rounded(self.stored_weights, self.level)

    def rounded(self, level: str | None) -> Self:
        """Return the checkpoint, rounded to a level; the level decides each weight's value in every dtype."""
        found = copy.copy(self)
        found.level, found.quantization = level, level or ""
        found.__dict__.pop("weights", None)
        return found

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that contain the weights."""

    @abstractmethod
    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises CheckpointError, UnsupportedModel."""

    @abstractmethod
    def close(self) -> None:
        """Close files, and give back the memory of what was read of them; weights can be read again."""

    @property
    def is_quantized(self) -> bool:
        """Return whether the files store quantised weights."""
        return any(weight.is_quantized for weight in self.weights.values())

    @property
    def skipped(self) -> int:
        """Return how many tensors are of parts that do not run, such as those that read images."""
        return 0

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's name and size. Raises CheckpointError, UnsupportedModel."""
        return {name: weight.size for name, weight in self.weights.items()}

    def quantized_bits(self) -> dict[str, float]:
        """Return the bits of a weight of every tensor that stays quantised, scales included."""
        return {name: weight.bits for name, weight in self.weights.items() if weight.bits is not None}

    @contextmanager
    def opened(self) -> Iterator[Weights]:
        """Yield the weights, and close the files at the end."""
        try:
            yield self.weights
        finally:
            self.close()


@dataclass(frozen=True)
class RoundedWeight:
    """A matrix in floating point that is rounded to a format as it is read. It is a `Weight`."""

    original: Weight
    kind: QuantizedFormat
    is_quantized = True

    @property
    def size(self) -> tuple[int, ...]:
        return self.original.size

    @property
    def bits(self) -> float:
        return self.kind.bits_per_weight

    def read(self, part: Part | None = None) -> Tensor:
        """Return the tensor dequantised, where `part` cuts a block in two or the operations need it."""
        weight = self.quantized()
        return self.original.read(part) if weight is None else weight.dequantized()[part or ...]

    def quantized(self) -> QuantizedTensor | None:
        return quantize(self.original.read(), self.kind)


def quantize(weight: Tensor, kind: QuantizedFormat) -> QuantizedTensor | None:
    """Round a matrix `[rows, inputs]` whose inputs are whole blocks of `kind`, one of those of `format_of`.

    The native kernel does it. Returns None without it, and for weights that are not finite or too large for fp16
    scales: they stay in floating point.
    """
    from ...kernels.native import KernelUnavailable, find_kernel
    from ...kernels.native.panels import round_weight

    try:
        return round_weight(find_kernel(), weight, kind)
    except KernelUnavailable:
        return None


def rounded(weights: Weights, level: str) -> dict[str, Weight]:
    """Return the weights, of which the matrices that a level (q4, q5, q6, q8) has a format for are rounded."""
    kinds = {name: format_of(level, name, weight.size) for name, weight in weights.items()}
    return {
        name: weight if (kind := kinds[name]) is None else RoundedWeight(weight, kind)
        for name, weight in weights.items()
    }
