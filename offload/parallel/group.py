"""What the ranks of a group do together, and the group of one that needs nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks 0 to `size - 1`. Each call is made by all of them, in the same order. All raise RankLost."""

    rank: int
    size: int
    local: int  # number of this rank among the `mates` on its machine
    mates: int

    def sum(self, x: Tensor) -> Tensor:
        """All ranks' `x`, of one size and type, added up; in place, and the same bits everywhere."""
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """All ranks' `x` `[rows, widths[rank]]` side by side: `[rows, sum of widths]`."""
        ...

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """Rank 0's numbers, for all; equally many everywhere. Whole ones stay exact up to 2^53."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value of any kind, for all; what the others give does not matter."""
        ...

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, in their order."""
        ...


class Alone:
    """A group of one."""

    rank, size = 0, 1
    local, mates = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x

    def agree(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def broadcast(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone()
