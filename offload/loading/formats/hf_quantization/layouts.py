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

from ....errors import UnsupportedModel
from .stored import HINT, Headers, ReadSmall, StoredMatrix, Values, check_fits, check_order, stems

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
        for stem in stems(headers, ".qweight", "I32"):
            packed, rows = headers[f"{stem}.qweight"].size
            groups, columns = headers[f"{stem}.qzeros"].size
            bits = 32 * columns / rows
            if bits not in (4, 8):
                raise UnsupportedModel(f"GPTQ with {bits:g} bits is not supported: {stem}", HINT)
            inputs = int(32 * packed // bits)
            group = -(-inputs // groups) if self.group is None or groups == 1 else self.group
            check_fits(f"{stem}.scales", headers, (-(-inputs // group), rows))
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
        for stem in stems(headers, ".qweight", "I32"):
            inputs, columns = headers[f"{stem}.qweight"].size
            groups = headers[f"{stem}.scales"].size[0]
            check_fits(f"{stem}.scales", headers, (groups, 8 * columns))
            check_fits(f"{stem}.qzeros", headers, (groups, columns))
            yield StoredMatrix(stem, (8 * columns, inputs), 4, inputs // groups, has_zeros=True)

    def read(self, matrix: StoredMatrix, tensor: Callable[[str], Tensor]) -> Values:
        from .codes import levels_of, unpacked, with_zeros

        codes, zeros = (
            unpacked(tensor(f"{matrix.stem}.{name}"), 4).unflatten(1, (-1, 8))[..., _PLACES].flatten(1).T
            for name in ("qweight", "qzeros")
        )
        return with_zeros(codes.contiguous(), tensor(f"{matrix.stem}.scales").T, levels_of(zeros, 4))


@dataclass(frozen=True)
class Float8Layout:
    """FP8; `block` are the rows and inputs that share a scale, where scales are a matrix of blocks."""

    block: tuple[int, int] = (128, 128)

    def matrices(self, headers: Headers, read: ReadSmall) -> Iterator[StoredMatrix]:
        for stem in stems(headers, ".weight", "F8_E4M3"):
            rows, inputs = size = headers[f"{stem}.weight"].size
            name = f"{stem}.weight_scale_inv"
            name = name if name in headers else f"{stem}.weight_scale"
            blocks = tuple(-(-count // each) for count, each in zip(size, self.block, strict=True))
            check_fits(name, headers, (), (1,), (1, 1), (rows,), (rows, 1), blocks)
            has_blocks = headers[name].size == blocks and blocks not in ((1, 1), (rows, 1))
            group = self.block[1] if has_blocks else inputs
            yield StoredMatrix(stem, size, 8, group, is_float=True, scales=name)

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
        for stem in stems(headers, ".weight_packed", "I32"):
            size = tuple(map(int, read(f"{stem}.weight_shape")))
            columns = headers[f"{stem}.weight_packed"].size[1]
            bits = next((bits for bits in (4, 8) if -(-size[1] // (32 // bits)) == columns), None)
            if bits is None:
                each = 32 * columns / size[1]
                raise UnsupportedModel(f"compressed-tensors with {each:g} bits is not supported: {stem}", HINT)
            yield self._matrix(f"{stem}.weight_packed", size, bits, headers, read)
        for stem in stems(headers, ".weight", "I8"):
            yield self._matrix(f"{stem}.weight", headers[f"{stem}.weight"].size, 8, headers, read)

    def _matrix(self, codes: str, size: tuple[int, int], bits: int, headers: Headers, read: ReadSmall) -> StoredMatrix:
        """Check the scales and zero points of integers."""
        stem = codes.rpartition(".")[0]
        scales = headers[f"{stem}.weight_scale"].size
        by_group = [(size[0], scales[-1])] if size[1] % scales[-1] == 0 else []
        check_fits(f"{stem}.weight_scale", headers, (1,), (1, 1), *by_group)
        group = size[1] // scales[-1]
        check_order(headers, read, f"{stem}.weight_g_idx", size[1], group)
        zeros = f"{stem}.weight_zero_point"
        if zeros in headers:
            check_fits(zeros, headers, scales, (-(-size[0] // (32 // bits)), scales[-1]))
        return StoredMatrix(stem, size, bits, group, has_zeros=zeros in headers, codes=codes)

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
