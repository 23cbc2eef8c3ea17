"""Rounds weights to 4, 5, 6 or 8 bits, in formats that GGUF files have too: a checkpoint does so as it is read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ...architecture.config import ModelShape
from ...architecture.weight_formats import QuantizedFormat, format_of
from ...kernels.native import KernelUnavailable, find_kernel
from ...kernels.native.panels import round_weight
from ...kernels.quantized import QuantizedTensor
from ..tokenizers.tokenizer import Tokenizer
from .safetensors import Checkpoint, TensorReader


def quantize(weight: Tensor, kind: QuantizedFormat) -> QuantizedTensor | None:
    """Round a matrix `[rows, inputs]` whose inputs are whole blocks of `kind`, one of those of `format_of`.

    The native kernel does it. Returns None without it, and for weights that are not finite or too large for fp16
    scales: they stay in floating point.
    """
    try:
        return round_weight(find_kernel(), weight, kind)
    except KernelUnavailable:
        return None


class QuantizedCheckpoint:
    """A `Checkpoint` in floating point, quantised to a level: q4, q5, q6 or q8.

    The level decides each weight's value, also where it is dequantised again.
    """

    def __init__(self, original: Checkpoint, level: str) -> None:
        self.original, self.level = original, level
        self.path: Path = original.path
        self.shape: ModelShape = original.shape
        self.generation: dict = original.generation

    is_quantized = True

    @property
    def quantization(self) -> str:
        return self.level

    @property
    def skipped(self) -> int:
        return self.original.skipped

    def files(self) -> list[Path]:
        return self.original.files()

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return self.original.sizes()

    def formats(self) -> dict[str, QuantizedFormat]:
        """Return the format of each tensor that is quantised, by its name."""
        formats = {name: format_of(self.level, name, size) for name, size in self.sizes().items()}
        return {name: kind for name, kind in formats.items() if kind is not None}

    def quantized_bits(self) -> dict[str, float]:
        return {name: kind.bits_per_weight for name, kind in self.formats().items()}

    @contextmanager
    def tensors(self) -> Iterator[TensorReader]:
        with self.original.tensors() as read:
            yield QuantizingReader(read, self.formats())

    def load_tokenizer(self) -> Tokenizer:
        return self.original.load_tokenizer()


class QuantizingReader:
    """A `TensorReader` that quantises what another one reads."""

    def __init__(self, read: TensorReader, formats: Mapping[str, QuantizedFormat]) -> None:
        self._read, self._formats = read, formats

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor; dequantised, where `part` cuts a block in two or the operations need it."""
        weight = self.quantized(name)
        return self._read(name, part) if weight is None else weight.dequantized()[part or ...]

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return a matrix quantised, or None if it stays in floating point."""
        kind = self._formats.get(name)
        return None if kind is None else quantize(self._read(name), kind)
