"""Finds each expert's matrices in tensors of safetensors files that have those of all experts.

Imports no torch until quantised ones are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...architecture.families import Family
from ...architecture.weight_formats import FORMATS
from ...errors import CheckpointError
from .hf_quantization.stored import Header, Headers

if TYPE_CHECKING:
    from ...kernels.quantized import QuantizedTensor

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+?)(_blocks)?")
_GROUP = 32  # weights of MXFP4 that share a scale


class View(NamedTuple):
    """A matrix or bias of one expert: `rows` of its part of the tensor `[experts, ...]`, every `step`-th from `start`.

    The part has rows of inputs where it `is_transposed`, and codes of MXFP4 where it `is_packed`.
    """

    tensor: str
    expert: int
    start: int
    step: int
    rows: int
    columns: tuple[int, ...]
    is_transposed: bool
    is_packed: bool


def expert_views(family: Family, headers: Headers) -> dict[str, View]:
    """Return the parts of tensors of all experts, by the decoder's names. Raises CheckpointError."""
    views: dict[str, View] = {}
    for name, header in headers.items():
        match = _LAYER.fullmatch(name)
        if match is not None and match[2] in family.stacked:
            exponents = headers.get(_scales_of(name))
            if match[3] and (exponents is None or header.size != (*exponents.size, _GROUP // 2)):
                raise CheckpointError(f"{name} and its scales are not MXFP4", "fetch the model again")
            names = [f"{match[1]}{each}" for each in family.stacked[match[2]]]
            views |= dict(_views(family, name, header, names, bool(match[3])))
    return views


def _views(
    family: Family, name: str, header: Header, names: Sequence[str], is_packed: bool
) -> Iterator[tuple[str, View]]:
    """Yield the parts of one tensor: for each expert those that `names` call."""
    is_transposed = family.transposes_experts and len(header.size) == 3
    axes = 4 if is_packed else 2 if names[0].endswith(".bias") else 3
    experts, *size = header.size if len(header.size) == axes else (0, 1)
    if is_transposed:
        size.reverse()
    if size[0] % len(names) or not experts:
        wanted = f"a list of matrices with rows for {len(names)}"
        raise CheckpointError(f"{name} is {list(header.size)}, not {wanted}", "fetch the model again")
    rows, columns = size[0] // len(names), (_GROUP * size[1],) if is_packed else tuple(size[1:])
    step = len(names) if family.interleaves_experts else 1
    for expert in range(experts):
        for number, each in enumerate(names):
            start = number if step > 1 else number * rows
            view = View(name, expert, start, step, rows, columns, is_transposed, is_packed)
            yield each.replace("*", str(expert)), view


def _scales_of(blocks: str) -> str:
    return f"{blocks.removesuffix('_blocks')}_scales"


def expert_headers(views: Mapping[str, View], headers: Headers) -> dict[str, Header]:
    """Return the headers with those of the matrices in place of the tensors of all experts."""
    whole = {view.tensor for view in views.values()}
    found = {name: header for name, header in headers.items() if name not in whole}
    for name, view in views.items():
        kind = "F32" if view.is_packed else headers[view.tensor].dtype
        found[name] = Header(kind, (view.rows, *view.columns))
    return found


def packed_bits(views: Mapping[str, View]) -> dict[str, float]:
    """Return the bits of a weight of the quantised matrices."""
    return {name: FORMATS["MXFP4"].bits_per_weight for name, view in views.items() if view.is_packed}


class ExpertReader:
    """A `TensorReader` of the matrices, over one of the tensors as they are stored."""

    def __init__(self, read: Any, views: Mapping[str, View]) -> None:
        self._read, self._views = read, views

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Any:
        view = self._views.get(name)
        if view is None:
            return self._read(name, part)
        if view.is_packed:
            return self.quantized(name).dequantized()[part or ...]
        rows, *columns = part or (slice(None),)
        start, end, _ = rows.indices(view.rows)
        some = slice(view.start + view.step * start, view.start + view.step * end, view.step)
        if view.is_transposed or view.step > 1:  # files are not read by steps
            whole = self._of_expert(view, view.tensor)
            return (whole.T if view.is_transposed else whole)[(some, *columns)]
        return self._read(view.tensor, (slice(view.expert, view.expert + 1), some, *columns))[0]

    def _of_expert(self, view: View, tensor: str) -> Any:
        return self._read(tensor, (slice(view.expert, view.expert + 1),))[0]

    def quantized(self, name: str) -> QuantizedTensor | None:
        view = self._views.get(name)
        if view is None:
            return self._read.quantized(name)
        if not view.is_packed:
            return None
        some = slice(view.start, view.start + view.step * view.rows, view.step)
        return _mxfp4(self._of_expert(view, view.tensor)[some], self._of_expert(view, _scales_of(view.tensor))[some])


def _mxfp4(packed: Any, exponents: Any) -> QuantizedTensor:
    """Return the matrix whose byte i of a group has code 2 i in its low half, and code 2 i + 1 in its high half."""
    import torch

    from .gguf_blocks import with_powers

    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return with_powers(FORMATS["MXFP4"], codes, exponents)
