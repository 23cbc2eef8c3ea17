"""Reads a checkpoint with quantised linears under the names of plain weights. Imports no torch itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .stored import Header, Headers, Layout, ReadSmall, StoredMatrix


class StoredMatrices:
    """The quantised weights of a checkpoint, by transformers' names of the plain ones.

    Raises CheckpointError, UnsupportedModel.
    """

    def __init__(self, layout: Layout, headers: Headers, read: ReadSmall) -> None:
        self._layout = layout
        self._matrices = {f"{each.stem}.weight": each for each in layout.matrices(headers, read)}

    def __bool__(self) -> bool:
        return bool(self._matrices)

    def plain(self, headers: Headers) -> dict[str, Header]:
        """Return the headers without those of the quantised weights' tensors."""
        stems = {each.stem for each in self._matrices.values()}
        return {
            name: x for name, x in headers.items() if name.endswith(".bias") or name.rpartition(".")[0] not in stems
        }

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the weights."""
        return {name: each.size for name, each in self._matrices.items()}

    def bits(self) -> dict[str, float]:
        """Return the bits of a weight of those that stay quantised."""
        kinds = {name: each.format(each.has_zeros) for name, each in self._matrices.items()}
        return {name: kind.bits_per_weight for name, kind in kinds.items() if kind is not None}

    def reader(self, read: Any) -> QuantizedReader:
        """Return a `TensorReader` over the one of the files."""
        return QuantizedReader(read, self._layout, self._matrices)


class QuantizedReader:
    """A `TensorReader` whose linears are quantised."""

    def __init__(self, read: Any, layout: Layout, matrices: Mapping[str, StoredMatrix]) -> None:
        self._read, self._layout, self._matrices = read, layout, matrices

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Any:
        """Return a tensor; quantised ones are dequantised to fp32, as a whole, and then sliced."""
        if name not in self._matrices:
            return self._read(name, part)
        from .codes import dequantized

        matrix = self._matrices[name]
        return dequantized(matrix, self._layout.read(matrix, self._read))[part or ...]

    def quantized(self, name: str) -> Any:
        """Return a `QuantizedTensor`, or None for a tensor that is plain or has to be dequantised."""
        if name not in self._matrices:
            return None
        from .codes import quantized

        matrix = self._matrices[name]
        return quantized(matrix, self._layout.read(matrix, self._read))
