"""Rounds weights as the native kernel does, with torch's operations: the reference of its tests.

The result depends on the weights alone: sums are added in a fixed order, so that every machine makes the same model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from offload.architecture.weight_formats import QuantizedFormat
from offload.kernels.native.panels import REFITS
from offload.kernels.quantized import QuantizedTensor

_PIECE = (1 << 15) - 1  # weights that are rounded at a time
Parts = tuple[Tensor | None, ...]  # the tensors of a QuantizedTensor, in its order


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
