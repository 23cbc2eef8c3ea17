"""n-gram lookup: what followed the last time that the text ended like this? (prompt lookup decoding)"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..sequence import TokenSequence, Watermarks
from .drafter import NOTHING, Draft


class SuffixIndex:
    """Where the longest suffix of a growing text has occurred before: an online suffix automaton.

    Appending a token takes constant time, amortised (Blumer et al., The smallest automaton recognizing the subwords of
    a text, 1985). A state stands for substrings that occur at the same positions; its link is their longest suffix that
    occurs at more.
    """

    def __init__(self) -> None:
        self.size = 0  # tokens
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of a state's longest substring
        self._end = [-1]  # the last token of one of its occurrences
        self._last = 0  # the state of the whole text
        self._match = (0, 0)  # state and length of the longest suffix that had occurred before
        self._match_end = -1

    def append(self, token: int) -> None:
        """The text goes on."""
        new = self._state(self._length[self._last] + 1, {}, 0, self.size)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._exact(state, token)
        self._last = new
        self.size += 1
        # Of the earlier positions the latest one that is known: text repeats what it has said of late.
        match = self._link[new]
        self._match, self._match_end = (match, self._length[match]), self._end[match]
        self._end[match] = self.size - 1

    def _state(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._link.append(link)
        self._end.append(end)
        return len(self._length) - 1

    def _exact(self, state: int, token: int) -> int:
        """The state of `state`'s longest substring and `token`, split off from longer ones if need be."""
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            return target
        split = self._state(self._length[state] + 1, dict(self._next[target]), self._link[target], self._end[target])
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._link[state]
        self._link[target] = split
        return split

    def match(self, tail: Sequence[int] = ()) -> tuple[int, int]:
        """For the text and a `tail` that is not part of it: how long the longest suffix is that the text holds already,
        and the token in the text that follows it there. (0, _) if there is none."""
        if not tail:
            return self._match[1], self._match_end + 1
        state, length = self._match
        for token in tail:
            while state > 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
            else:
                length = 0
        return length, self._end[state] + 1


class LookupDrafter:
    """Proposes what followed the longest suffix of the sequence that occurred before; its proposals are certain."""

    name = "lookup"
    share = 0.0
    prior = 0.6

    def __init__(self, shortest: int = 2) -> None:
        self._shortest = shortest  # matches below say next to nothing
        self._index = SuffixIndex()
        self._marks: Watermarks | None = None  # of the sequence that is indexed

    def outlook(self, sequence: TokenSequence) -> Hashable:
        length, _ = self._match(sequence)
        return None if length < self._shortest else min(length.bit_length(), 5)  # 2-3, 4-7, 8-15, 16 and more

    def propose(self, sequence: TokenSequence, limit: int) -> Draft:
        length, position = self._match(sequence)
        if length < self._shortest:
            return NOTHING
        proposed = sequence.tokens[position : position + limit]
        assert proposed or not limit, "a match ends before the text does"
        while len(proposed) < limit:  # the text has caught up with itself: it goes round in a circle
            proposed += proposed[: limit - len(proposed)]
        return Draft(proposed, None)

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def _match(self, sequence: TokenSequence) -> tuple[int, int]:
        """Index what has been committed since the last time, then match; the tentative tokens are never indexed."""
        index, self._index = self._index, SuffixIndex()  # interrupted while it grows, an index is good for nothing
        unchanged = sequence.marks.look(self, len(sequence))
        if unchanged < index.size or sequence.marks is not self._marks:
            index, self._marks = SuffixIndex(), sequence.marks
        for token in sequence.tokens[index.size : sequence.committed]:
            index.append(token)
        self._index = index
        return index.match(sequence.tentative)
