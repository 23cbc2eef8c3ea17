"""compressed-tensors' layouts: codes packed in int32 along the inputs, or bytes, or FP8; and FP8 by itself.

`weight_packed` `[out, inputs * bits / 32]` with `weight_shape`, or `weight` `[out, inputs]`; `weight_scale`
`[out, groups]`, `weight_zero_point` or packed along the outputs; `weight_g_idx` `[inputs]`, each input's group.

FP8 is e4m3 codes with a scale for the tensor, for each row, or for each block of rows and inputs. As DeepSeek-V3,
Qwen3-FP8 and transformers' `fp8` write it: `weight` and `weight_scale_inv` (`weight_scale` elsewhere), by which the
weight is multiplied in spite of its name. Scales of activations are not used: activations stay in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....errors import CheckpointError, UnsupportedModel
from .stored import FLOATS, HINT, Headers, ReadSmall, StoredMatrix, Values, check_order, mismatch, required, stems

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


@dataclass(frozen=True)
class CompressedTensorsLayout:
    """compressed-tensors with integers of 4 or 8 bits, and FP8."""

    float8: Float8Layout = field(default_factory=Float8Layout)

    def matrices(self, headers: Headers, read: ReadSmall) -> Iterator[StoredMatrix]:
        yield from self.float8.matrices(headers, read)
        for stem in stems(headers, ".weight_packed"):
            yield self._packed(stem, headers, read)
        for stem in stems(headers, ".weight", "I8"):
            yield self._matrix(f"{stem}.weight", required(headers, f"{stem}.weight", 2, "I8"), 8, headers, read)

    def _packed(self, stem: str, headers: Headers, read: ReadSmall) -> StoredMatrix:
        rows, columns = required(headers, f"{stem}.weight_packed", 2, "I32")
        required(headers, f"{stem}.weight_shape", 1, "I64", "I32")
        size = tuple(map(int, read(f"{stem}.weight_shape")))
        if len(size) != 2 or size[0] != rows or size[1] < 1:
            raise mismatch(f"{stem}.weight_shape", size)
        bits = next((bits for bits in (4, 8) if -(-size[1] // (32 // bits)) == columns), None)
        if bits is None:
            raise UnsupportedModel(
                f"compressed-tensors with {32 * columns / size[1]:g} bits is not supported: {stem}", HINT
            )
        return self._matrix(f"{stem}.weight_packed", size, bits, headers, read)

    def _matrix(self, codes: str, size: tuple[int, int], bits: int, headers: Headers, read: ReadSmall) -> StoredMatrix:
        """Check the scales and zero points of integers."""
        stem = codes.rpartition(".")[0]
        scales = headers.get(f"{stem}.weight_scale")
        found = required(headers, f"{stem}.weight_scale", 1 if scales and len(scales.size) == 1 else 2, *FLOATS)
        if found not in ((1,), (1, 1)) and (found[0] != size[0] or len(found) != 2 or size[1] % found[1]):
            raise mismatch(f"{stem}.weight_scale", found)
        group = size[1] // found[-1]
        check_order(headers, read, f"{stem}.weight_g_idx", size[1], group)
        name = f"{stem}.weight_zero_point"
        if name in headers:
            zeros = required(headers, name, len(found), "I8", "I32")
            packed = (-(-size[0] // (32 // bits)), found[-1])
            if zeros != (packed if headers[name].dtype == "I32" else found):
                raise mismatch(name, zeros)
        return StoredMatrix(stem, size, bits, group, has_zeros=name in headers, codes=codes)

    def read(self, matrix: StoredMatrix, tensor: Callable[[str], Tensor]) -> Values:
        if matrix.is_float:
            return self.float8.read(matrix, tensor)
        import torch

        from .codes import levels_of, signed_codes, unpacked, with_zeros

        (rows, inputs), bits = matrix.size, matrix.bits
        codes, scales = tensor(matrix.codes), tensor(f"{matrix.stem}.weight_scale")
        if matrix.codes.endswith("packed"):
            codes = signed_codes(unpacked(codes, bits)[:, :inputs], bits)
        scales = scales.float().reshape(-1, inputs // matrix.group).expand(rows, -1)
        if not matrix.has_zeros:
            return Values(codes, scales)
        zeros = tensor(f"{matrix.stem}.weight_zero_point")
        if zeros.dtype == torch.int8:
            zeros = zeros.float().reshape(-1, scales.shape[1])
        else:
            zeros = levels_of(unpacked(zeros.T, bits).T[:rows], bits)
        return with_zeros(codes, scales, zeros)
