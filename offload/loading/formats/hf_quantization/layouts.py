"""The layouts of quantised linears: GPTQ, AWQ, FP8 and compressed-tensors.

GPTQ, as AutoGPTQ and GPTQModel write it: codes of one output in the bits of consecutive int32, along the inputs.
`qweight` `[inputs * bits / 32, out]`, `qzeros` `[groups, out * bits / 32]`, `scales` `[groups, out]`, and `g_idx`
`[inputs]`, the group of each input.

AWQ (AutoAWQ, version GEMM): 4-bit codes of eight outputs in an int32, interleaved. `qweight` `[inputs, out / 8]`,
`qzeros` `[groups, out / 8]`, `scales` `[groups, out]`.

FP8: e4m3 codes with a scale for the tensor, for each row, or for each block of rows and inputs. As DeepSeek-V3,
Qwen3-FP8 and transformers' `fp8` write it: `weight` and `weight_scale_inv` (`weight_scale` elsewhere), by which the
weight is multiplied in spite of its name. Scales of activations are not used: activations stay in bf16.

compressed-tensors: codes packed in int32 along the inputs, or bytes, or FP8. `weight_packed`
`[out, inputs * bits / 32]` with `weight_shape`, or `weight` `[out, inputs]`; `weight_scale` `[out, groups]`,
`weight_zero_point` or packed along the outputs; `weight_g_idx` `[inputs]`, each input's group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....errors import CheckpointError, UnsupportedModel
from .stored import FLOATS, HINT, Headers, ReadSmall, StoredMatrix, Values, check_order, mismatch, required, stems

if TYPE_CHECKING:
    from torch import Tensor


_ONE = {4: 0x11111111, 8: 0x01010101}  # 1 in each code of an int32


@dataclass(frozen=True)
class GPTQLayout:
    """GPTQ with 4 or 8 bits.

    Args:
        symmetric: whether the zero points are meant to be the codes' middle; the stored ones decide.
        less_one: whether zero points are stored less 1, as in the first version of the format.
        group: the inputs that share a scale; None: as many as the number of scales says.
    """

    symmetric: bool
    less_one: bool
    group: int | None = None

    def matrices(self, headers: Headers, read: ReadSmall) -> Iterator[StoredMatrix]:
        for stem in stems(headers, ".qweight"):
            packed, rows = required(headers, f"{stem}.qweight", 2, "I32")
            groups, columns = required(headers, f"{stem}.qzeros", 2, "I32")
            bits = 32 * columns / rows
            if bits not in (4, 8):
                raise UnsupportedModel(f"GPTQ with {bits:g} bits is not supported: {stem}", HINT)
            inputs = int(32 * packed // bits)
            group = -(-inputs // groups) if self.group is None or groups == 1 else self.group
            if required(headers, f"{stem}.scales", 2, *FLOATS) != (groups, rows) or -(-inputs // group) != groups:
                raise mismatch(f"{stem}.scales", headers[f"{stem}.scales"].size)
            check_order(headers, read, f"{stem}.g_idx", inputs, group)
            yield StoredMatrix(stem, (rows, inputs), int(bits), group, not self.symmetric)

    def read(self, matrix: StoredMatrix, tensor: Callable[[str], Tensor]) -> Values:
        from .codes import levels_of, signed_codes, unpacked, with_zeros

        stem, bits = matrix.stem, matrix.bits
        codes = unpacked(tensor(f"{stem}.qweight").T.contiguous(), bits)
        # With a carry, as GPTQModel converts the first version of the format to the second.
        zeros = tensor(f"{stem}.qzeros") + (_ONE[bits] if self.less_one else 0)
        levels = levels_of(unpacked(zeros, bits).T, bits)
        return with_zeros(signed_codes(codes, bits), tensor(f"{stem}.scales").T, levels)


_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the digit of an int32 in which each of eight outputs is stored


class AWQLayout:
    """AWQ with 4 bits and zero points."""

    def matrices(self, headers: Headers, read: ReadSmall) -> Iterator[StoredMatrix]:
        for stem in stems(headers, ".qweight"):
            inputs, columns = required(headers, f"{stem}.qweight", 2, "I32")
            groups, rows = required(headers, f"{stem}.scales", 2, *FLOATS)
            if rows != 8 * columns or inputs % groups:
                raise mismatch(f"{stem}.scales", (groups, rows))
            if (found := required(headers, f"{stem}.qzeros", 2, "I32")) != (groups, columns):
                raise mismatch(f"{stem}.qzeros", found)
            yield StoredMatrix(stem, (rows, inputs), 4, inputs // groups, has_zeros=True)

    def read(self, matrix: StoredMatrix, tensor: Callable[[str], Tensor]) -> Values:
        from .codes import levels_of, unpacked, with_zeros

        codes, zeros = (
            unpacked(tensor(f"{matrix.stem}.{name}"), 4).unflatten(1, (-1, 8))[..., _PLACES].flatten(1).T
            for name in ("qweight", "qzeros")
        )
        return with_zeros(codes.contiguous(), tensor(f"{matrix.stem}.scales").T, levels_of(zeros, 4))


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
