"""Rounds weights to 4, 5, 6 or 8 bits, in formats that GGUF files have too: a checkpoint does so as it is read.

The result depends on the weights alone: sums are added in a fixed order, so that every machine makes the same model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...architecture.config import ModelShape
from ...architecture.weight_formats import QuantizedFormat, format_of
from ...kernels.native import KernelUnavailable, find_kernel
from ...kernels.native.panels import REFITS, round_weight
from ...kernels.quantized import QuantizedTensor
from ..tokenizers.tokenizer import Tokenizer
from .safetensors import Checkpoint, TensorReader

# Weights that are rounded at a time. Torch runs operations on fewer than 2^15 numbers on the calling thread alone;
# its own threads would wait for each other after every one of them, beside another busy process for milliseconds.
_PIECE = (1 << 15) - 1

Parts = tuple[Tensor | None, ...]  # the tensors of a QuantizedTensor, in its order


def quantize(weight: Tensor, kind: QuantizedFormat) -> QuantizedTensor | None:
    """Round a matrix `[rows, inputs]` whose inputs are whole blocks of `kind`, one of those of `format_of`.

    The native kernel does it where there is one. Returns None for weights that are not finite or too large for fp16
    scales.
    """
    try:
        return round_weight(find_kernel(), weight, kind)
    except KernelUnavailable:
        return quantize_by_torch(weight, kind)


def quantize_by_torch(weight: Tensor, kind: QuantizedFormat) -> QuantizedTensor | None:
    """Round as `quantize`, to the same bits, with torch's operations."""
    rounded = [_ROUNDERS[kind.name](part.float(), kind) for part in weight.split(max(1, _PIECE // weight.shape[1]))]
    whole = [None if pieces[0] is None else torch.cat(pieces) for pieces in zip(*rounded, strict=True)]
    fits = all(x.isfinite().all() for x in whole if x is not None and x.is_floating_point())
    codes, *numbers = whole
    return QuantizedTensor(kind, codes.unflatten(1, (-1, 32)), *numbers) if fits else None


def _round_with_minimum(weight: Tensor, kind: QuantizedFormat) -> Parts:
    """Return codes, scales and minima: first of each group's range, then fitted; of each group the best are taken."""
    most = len(kind.levels) - 1
    x = _columns(weight, 32)
    minimum = x.amin(0)
    scale, best = (x.amax(0) - minimum) / most, None
    if not (scale.half().isfinite() & minimum.half().isfinite()).all():  # a fit could hide that they were too large
        scale, minimum = (numbers.half().view(len(weight), -1) for numbers in (scale, minimum))
        return torch.zeros_like(weight, dtype=torch.uint8), scale, minimum
    for _ in range(1 + REFITS):
        scale, minimum = scale.half(), minimum.half()
        codes = _codes(x - minimum.float(), scale.float(), 0, most)
        best = _better((_error(codes * scale.float() + minimum.float(), x), scale, minimum), best)
        scale, minimum = _fit_line(codes, x)
    _, scale, minimum = best
    codes = _codes(x - minimum.float(), scale.float(), 0, most)
    return _rows(codes, weight).to(torch.uint8), scale.view(len(weight), -1), minimum.view(len(weight), -1)


def _round_nested(weight: Tensor, kind: QuantizedFormat) -> Parts:
    """Return codes, the int8 scales of 16 weights, no minima, and the fp16 factors of 256 weights."""
    first, last = kind.levels[0], kind.levels[-1]
    x = _columns(weight, kind.group)
    low, high = x.amin(0), x.amax(0)
    scale, best = torch.where(-low > high, low, high) / first, None  # the extreme gets the level that has no negative
    for _ in range(1 + REFITS):
        codes = _codes(x, scale, first, last)
        best = _better((_error(codes * scale, x), scale), best)
        scale = _sum(codes * x) / _sum(codes.square()).clamp_(min=1)
    scales = best[1].view(len(weight), -1, kind.block // kind.group)
    factors = (scales.gather(2, scales.abs().argmax(2, keepdim=True)) / -128).half()
    steps = _codes(scales, factors.float(), -128, 127)
    codes = _codes(x, (steps * factors.float()).flatten(), first, last) - first
    steps, factors = steps.to(torch.int8).view(len(weight), -1), factors.view(len(weight), -1)
    return _rows(codes, weight).to(torch.uint8), steps, None, factors


def _round_bytes(weight: Tensor, kind: QuantizedFormat) -> Parts:
    """Return codes and scales: the largest weight of a group is 127 steps."""
    x = _columns(weight, 32)
    scale = (x.abs().amax(0) / 127).half()
    return _rows(_codes(x, scale.float(), -127, 127), weight).to(torch.int8), scale.view(len(weight), -1)


_ROUNDERS: dict[str, Callable[[Tensor, QuantizedFormat], Parts]] = {
    "Q4_1": _round_with_minimum,
    "Q5_1": _round_with_minimum,
    "Q6_K": _round_nested,
    "Q8_0": _round_bytes,
}


def _columns(weight: Tensor, group: int) -> Tensor:
    """Return each group as a column `[group, groups]`: operations on groups are then vectorised over them."""
    return weight.reshape(-1, group).T.contiguous()


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """Undo `_columns`."""
    return x.T.reshape(weight.shape)


def _codes(x: Tensor, scale: Tensor, first: int, last: int) -> Tensor:
    """Return the whole numbers nearest to `x / scale`; 0 where the scale is 0."""
    return (x / torch.where(scale == 0, torch.inf, scale)).round_().clamp_(first, last)


def _fit_line(codes: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the minimum of each group that have the least squared error for these codes."""
    mean_code, mean = _sum(codes) / len(x), _sum(x) / len(x)
    centred = codes - mean_code
    scale = _sum(centred * (x - mean)) / _sum(centred.square()).clamp_(min=1e-9)
    return scale, mean - scale * mean_code


def _error(values: Tensor, x: Tensor) -> Tensor:
    return _sum(values.sub_(x).square_())


def _better(new: Parts, old: Parts | None) -> Parts:
    """Return for each group the one whose error, the first tensor, is less."""
    return new if old is None else tuple(torch.where(new[0] < old[0], *pair) for pair in zip(new, old, strict=True))


def _sum(x: Tensor) -> Tensor:
    """Return the sums of columns, added pairwise: torch's own order depends on the machine."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


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
