"""The protocol of drafters."""

from collections.abc import Hashable
from typing import Protocol

from ...sequence import TokenSequence
from ..trees.tree import Draft, DraftedTree

LONGEST_DRAFT = 24  # tokens


class Drafter(Protocol):
    """Proposes the next tokens. A level of speculation is a drafter for the level above it."""

    @property
    def name(self) -> str:
        """The name in statistics."""

    @property
    def relative_cost(self) -> float:
        """The expected time per drafted token, relative to a plain step of the verifier."""

    @property
    def branches(self) -> bool:
        """Whether it can draft trees."""

    @property
    def longest(self) -> int:
        """The most tokens of its drafts: the depth of trees."""

    @property
    def setups(self) -> int:
        """How many one-off costs, such as selections of a retrieval cache, its drafts have included so far."""

    def setup_cost(self, sequence: TokenSequence) -> float:
        """Estimate the one-off cost that the next draft would include, in plain steps of the target; 0 if none."""

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        """Return the kind of draft that `propose` would return now, or None if it would be empty.

        The scheduler estimates an acceptance rate for each kind.
        """

    def prior(self, kind: Hashable) -> float:
        """Return the acceptance rate to expect of drafts of a kind, until measurements replace it."""

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        """Return up to `limit` tokens that may follow the sequence, which is unchanged afterwards.

        With a `tree`, a drafter that can branch returns a tree of that shape or a smaller one, up to the depth `limit`.
        Sampled tokens must not be filtered by their value: the verification would no longer be lossless.
        """

    def observe(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of the last draft were accepted."""
