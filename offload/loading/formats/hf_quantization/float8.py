"""FP8 weights: e4m3 codes, with a scale for the tensor, for each row, or for each block of rows and inputs.

As DeepSeek-V3, Qwen3-FP8 and transformers' `fp8` write it: `weight` and `weight_scale_inv` (`weight_scale` elsewhere),
by which the weight is multiplied in spite of its name. Scales of activations are not used: activations stay in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....errors import CheckpointError
from .stored import FLOATS, Headers, ReadSmall, StoredMatrix, Values, mismatch, required, stems

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Float8Layout:
    """FP8; `block` are the rows and inputs that share a scale, where scales are a matrix of blocks."""

    block: tuple[int, int] = (128, 128)

    def matrices(self, headers: Headers, read: ReadSmall) -> Iterator[StoredMatrix]:
        for stem in stems(headers, ".weight", "F8_E4M3"):
            size = required(headers, f"{stem}.weight", 2, "F8_E4M3")
            name = next((f"{stem}.{each}" for each in _SCALES if f"{stem}.{each}" in headers), None)
            if name is None:
                raise CheckpointError(f"the tensor {stem}.{_SCALES[0]} is missing", "fetch the model again")
            scales = required(headers, name, len(headers[name].size), *FLOATS)
            yield StoredMatrix(stem, size, 8, self._group(name, size, scales), is_float=True, scales=name)

    def _group(self, name: str, size: tuple[int, int], scales: tuple[int, ...]) -> int:
        """Return the inputs that share a scale. Raises CheckpointError."""
        if scales in ((), (1,), (1, 1), (size[0],), (size[0], 1)):
            return size[1]
        if scales == tuple(-(-count // each) for count, each in zip(size, self.block, strict=True)):
            return self.block[1]
        raise mismatch(name, scales)

    def read(self, matrix: StoredMatrix, tensor: Callable[[str], Tensor]) -> Values:
        rows, inputs = matrix.size
        scales = tensor(matrix.scales).float()
        if matrix.group == inputs and scales.numel() in (1, rows):  # of blocks there may be as many as rows
            scales = scales.reshape(-1, 1).expand(rows, 1)
        else:
            scales = scales.repeat_interleave(self.block[0], 0)[:rows]
        return Values(tensor(f"{matrix.stem}.weight"), scales)
