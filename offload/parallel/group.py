"""The collectives of a group of ranks, and the group of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks 0 to `size - 1`. All ranks make the same calls in the same order. Every call raises RankLost."""

    rank: int
    size: int
    local: int  # index of this rank among the `mates` ranks of its machine
    mates: int

    def sum(self, x: Tensor) -> Tensor:
        """Sum all ranks' `x`, of one size and dtype (all-reduce); in place, with the same bits on every rank."""
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return all ranks' `x` `[rows, widths[rank]]` side by side: `[rows, sum of widths]` (all-gather)."""
        ...

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """Broadcast rank 0's numbers, equally many on every rank; integers stay exact up to 2^53."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Broadcast rank 0's value; the other ranks' values are ignored. It must be JSON: tuples arrive as lists."""
        ...

    def collect(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. It must be JSON, as for `broadcast`."""
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
