"""The token sequence that is being generated, and the watermarks that tell its followers where it has changed."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary


class Watermarks:
    """For every follower of a sequence, the length of the prefix that is unchanged since its last update.

    With it, the cost of synchronising a cache is proportional to the tokens that changed, not to all tokens.
    """

    def __init__(self) -> None:
        self._marks: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def lower(self, length: int) -> None:
        """Note that tokens at position `length` and after may have changed."""
        for follower, mark in self._marks.items():
            if mark > length:
                self._marks[follower] = length

    def unchanged(self, follower: object) -> int:
        """Return how many leading tokens are unchanged since this follower's last update (0 at the first one).

        A follower that an interrupt must not leave out of step asks, makes up for the change, and then updates.
        """
        return self._marks.get(follower, 0)

    def update(self, follower: object, length: int) -> int:
        """Return how many leading tokens are unchanged since this follower's last update (0 at the first one).

        From now on the follower has seen `length` tokens.
        """
        unchanged = self._marks.get(follower, 0)
        self._marks[follower] = length
        return unchanged


class TokenSequence:
    """Token ids: the committed ones, and after them the tentative ones of a level of speculation that is drafting.

    A level appends the tokens that it drafts, and truncates them before the level above verifies them.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.tokens = list(ids)
        self.committed = len(self.tokens)
        self.marks = Watermarks()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tentative(self) -> list[int]:
        return self.tokens[self.committed :]

    def extend(self, ids: Sequence[int]) -> None:
        """Append tentative tokens."""
        self.tokens += ids

    def commit(self) -> None:
        """Mark all tokens as committed."""
        self.committed = len(self.tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        assert 0 <= length <= len(self.tokens), f"cannot truncate {len(self.tokens)} tokens to {length}"
        if length < len(self.tokens):
            self.marks.lower(length)  # first: after an interrupt in between, followers must still see the change
            del self.tokens[length:]
            self.committed = min(self.committed, length)

    def restart(self, ids: Sequence[int]) -> None:
        """Replace all tokens by `ids`, all committed; followers see the common prefix as unchanged."""
        self.truncate(common_prefix(self.tokens, ids))
        self.extend(ids[len(self.tokens) :])
        self.commit()


_RUN = 1024  # tokens that are compared at once


def common_prefix(first: Sequence[int], second: Sequence[int], known: int = 0) -> int:
    """Return the length of the longest common prefix; the first `known` tokens are not compared."""
    length = min(len(first), len(second))
    # Slices of lists are compared in C, twenty times as fast.
    while known < length and first[known : known + _RUN] == second[known : known + _RUN]:
        known += _RUN
    while known < length and first[known] == second[known]:
        known += 1
    return min(known, length)
