"""GPTQ's layout: codes of one output in the bits of consecutive int32, along the inputs. And AWQ's: of eight outputs.

As AutoGPTQ and GPTQModel write it: `qweight` `[inputs * bits / 32, out]`, `qzeros` `[groups, out * bits / 32]`,
`scales` `[groups, out]`, and `g_idx` `[inputs]`, the group of each input.

AWQ (AutoAWQ, version GEMM): 4-bit codes of eight outputs in an int32, interleaved; `qweight` `[inputs, out / 8]`,
`qzeros` `[groups, out / 8]`, `scales` `[groups, out]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....errors import UnsupportedModel
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
