"""AWQ's layout (AutoAWQ, version GEMM): 4-bit codes of eight outputs in an int32, interleaved.

`qweight` `[inputs, out / 8]`, `qzeros` `[groups, out / 8]`, `scales` `[groups, out]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .stored import FLOATS, Headers, ReadSmall, StoredMatrix, Values, mismatch, required, stems

if TYPE_CHECKING:
    from torch import Tensor

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
