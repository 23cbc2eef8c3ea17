"""The unit that `auto` learns from: a draft and its verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..trees.tree import Visit, tree_of, visits

if TYPE_CHECKING:
    from ..drafters.drafter import Drafter


class Cycle(NamedTuple):
    """One draft and its verification, or a plain step if `drafter` is None.

    Attributes:
        first: the first token emitted.
        drafted: the length of a chain, or the depth of a tree.
        draft_s, verify_s: seconds.
        draft_setup, verify_setup: whether these include a one-off cost, such as a selection of the retrieval cache.
        parents, path: of a tree, and its nodes that were accepted.
    """

    drafter: Drafter | None
    first: int
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    draft_setup: bool = False
    verify_setup: bool = False
    parents: tuple[int, ...] | None = None  # None: a chain
    path: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """The rows of the verification."""
        return (self.drafted if self.parents is None else len(self.parents)) + 1

    @property
    def visits(self) -> list[Visit]:
        """The nodes whose children the verification tried."""
        if self.parents is not None:
            return visits(tree_of(self.parents), self.path)
        return [Visit(1, 0)] * self.accepted + [Visit(1, None)] * (self.accepted < self.drafted)
