"""n-gram lookup (prompt lookup decoding): propose the tokens that followed an earlier occurrence of the suffix."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence

from ..sequence import TokenSequence, Watermarks
from .draft import NOTHING, Draft, DraftedTree
from .tree import ROOT

_SHARES = (0.8, 0.2, 0.1, 0.05)  # of the chance of a suffix: of the tokens that followed it, by rank


class SuffixIndex:
    """Finds earlier occurrences of the longest suffix of a growing text: an online suffix automaton.

    Appending a token takes amortised constant time (Blumer et al., The smallest automaton recognizing the subwords of
    a text, 1985). A state represents all substrings that end at the same positions. Its link is the state of their
    longest suffix that occurs at more positions.
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
        """Append a token to the text."""
        new = self._new_state(self._length[self._last] + 1, {}, 0, self.size)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._last = new
        self.size += 1
        # Of the earlier occurrences the latest known one: recent text is the best predictor.
        match = self._link[new]
        self._match, self._match_end = (match, self._length[match]), self._end[match]
        self._end[match] = self.size - 1

    @property
    def num_states(self) -> int:
        """The number of states of the automaton; at most twice the number of tokens."""
        return len(self._length)

    @property
    def num_transitions(self) -> int:
        """The number of transitions between states; at most three times the number of tokens."""
        return sum(map(len, self._next))

    def _new_state(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._link.append(link)
        self._end.append(end)
        return len(self._length) - 1

    def _split(self, state: int, token: int) -> int:
        """Return the state of `state`'s longest substring followed by `token`, split from longer ones if needed."""
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            return target
        split = self._new_state(
            self._length[state] + 1, dict(self._next[target]), self._link[target], self._end[target]
        )
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._link[state]
        self._link[target] = split
        return split

    def match(self, tail: Sequence[int] = ()) -> tuple[int, int]:
        """Return the length of the longest suffix of text + `tail` that occurs earlier in the text, and the position of
        the token that follows it there. The length is 0 if there is none. The tail is not added to the text.
        """
        if not tail:
            return self._match[1], self._match_end + 1
        state, length = self._matching_state(tail)
        return length, self._end[state] + 1

    def _matching_state(self, tail: Sequence[int]) -> tuple[int, int]:
        """Return the state of the suffix that `match` finds, and its length."""
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
        return state, length

    def continuations(
        self, tail: Sequence[int], nodes: int, depth: int, shortest: int
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return a tree of what followed suffixes of text + `tail` of at least `shortest` tokens: tokens and parents.

        It has up to `nodes` nodes and is up to `depth` deep. Of a node's children, tokens that followed the longest
        suffix come first, and of those, the ones that followed it latest.
        """
        tokens: list[int] = []
        parents: list[int] = []
        # By falling share; the number of an entry breaks ties in order.
        waiting = [(-1.0, 0, ROOT, -1, *self._matching_state(tail), 0)]
        entries = itertools.count(1)
        while waiting and len(tokens) < nodes:
            share, _, parent, token, state, length, level = heapq.heappop(waiting)
            node = ROOT
            if level:
                node = len(tokens)
                tokens.append(token)
                parents.append(parent)
            if level < depth:
                for rank, (following, below, seen) in enumerate(self._following(state, length, shortest)):
                    entry = (share * _SHARES[rank], next(entries), node, following, below, seen, level + 1)
                    heapq.heappush(waiting, entry)
        return tokens, tuple(parents)

    def _following(self, state: int, length: int, shortest: int) -> list[tuple[int, int, int]]:
        """Return tokens that followed a suffix, the best ones first: token, state and length of the suffix with it."""
        found: dict[int, tuple[int, int, int]] = {}
        while length >= shortest and state > 0 and len(found) < len(_SHARES):
            after = self._next[state]
            latest = heapq.nlargest(len(_SHARES), after, key=lambda token: self._end[after[token]])
            for token in latest:
                found.setdefault(token, (token, after[token], length + 1))
            state = self._link[state]
            length = self._length[state]
        return list(found.values())[: len(_SHARES)]


class LookupDrafter:
    """Proposes the tokens that followed the longest repeated suffix of the sequence, with one-hot distributions."""

    name = "lookup"
    relative_cost = 0.0
    prior = 0.6
    setups = 0

    def __init__(self, shortest: int = 2) -> None:
        self._shortest = shortest  # shorter matches predict next to nothing
        self._index = SuffixIndex()
        self._marks: Watermarks | None = None  # of the sequence that is indexed

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        length, _ = self._match(sequence)
        return None if length < self._shortest else min(length.bit_length(), 5)  # 2-3, 4-7, 8-15, 16 and more

    def setup_cost(self, sequence: TokenSequence) -> float:
        return 0.0

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        length, position = self._match(sequence)
        if length < self._shortest:
            return NOTHING
        if tree is not None:
            nodes, shortest = len(tree.parents), self._shortest
            tokens, parents = self._index.continuations(sequence.tentative, nodes, limit, shortest)
            return Draft(tokens, None, parents) if tokens else NOTHING
        proposed = sequence.tokens[position : position + limit]
        assert proposed or not limit, "a match ends before the text does"
        while len(proposed) < limit:  # the match overlaps the end of the text: the text is periodic
            proposed += proposed[: limit - len(proposed)]
        return Draft(proposed, None)

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def _match(self, sequence: TokenSequence) -> tuple[int, int]:
        """Index the tokens committed since the last call, then match. Tentative tokens are not indexed."""
        index, self._index = self._index, SuffixIndex()  # an index that is interrupted while it grows is unusable
        unchanged = sequence.marks.update(self, len(sequence))
        if unchanged < index.size or sequence.marks is not self._marks:
            index, self._marks = SuffixIndex(), sequence.marks
        for token in sequence.tokens[index.size : sequence.committed]:
            index.append(token)
        self._index = index
        return index.match(sequence.tentative)
