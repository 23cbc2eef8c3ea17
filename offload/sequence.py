"""The token sequence under way, and how those who follow it learn from where on it has changed."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary


class Watermarks:
    """For every follower of a growing and shrinking sequence: how much of it is as it was at the last look.

    That makes bringing a cache in step cost what has changed, not what there is.
    """

    def __init__(self) -> None:
        self._marks: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def lower(self, length: int) -> None:
        """Whatever came at `length` or later may be different from now on."""
        for follower, mark in self._marks.items():
            if mark > length:
                self._marks[follower] = length

    def look(self, follower: object, length: int) -> int:
        """Leading tokens that are unchanged since this follower's last look (0 at the first); it now sees `length`."""
        unchanged = self._marks.get(follower, 0)
        self._marks[follower] = length
        return unchanged


class TokenSequence:
    """Token ids: those that are emitted for good, and behind them those that a level of speculation is trying out.

    A level appends what it emits while it drafts, and takes it back when the next level has to judge.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.tokens = list(ids)
        self.committed = len(self.tokens)
        self.marks = Watermarks()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tentative(self) -> list[int]:
        """The tokens that are not committed."""
        return self.tokens[self.committed :]

    def extend(self, ids: Sequence[int]) -> None:
        """Try these tokens out."""
        self.tokens += ids

    def commit(self) -> None:
        """Everything is emitted now."""
        self.committed = len(self.tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        assert 0 <= length <= len(self.tokens), f"cannot truncate {len(self.tokens)} tokens to {length}"
        if length < len(self.tokens):
            self.marks.lower(length)  # first: an interrupt in between must not leave followers unaware
            del self.tokens[length:]
            self.committed = min(self.committed, length)

    def restart(self, ids: Sequence[int]) -> None:
        """Become this sequence, all of it committed; the prefix that it shares with the old one is unchanged."""
        self.truncate(common_prefix(self.tokens, ids))
        self.extend(ids[len(self.tokens) :])
        self.commit()


def common_prefix(first: Sequence[int], second: Sequence[int], known: int = 0) -> int:
    """Length of the longest common prefix, of which `known` tokens are known already."""
    length = min(len(first), len(second))
    while known < length and first[known] == second[known]:
        known += 1
    return known
