"""n-gram lookup (prompt lookup decoding): propose the tokens that followed an earlier occurrence of the suffix."""

import heapq
import itertools
from array import array
from collections.abc import Hashable, Sequence

from ...sequence import TokenSequence, Watermarks
from ..trees.tree import NOTHING, ROOT, Draft, DraftedTree

_NONE = -1  # no token, or no state
_SHORTEST = 2  # tokens of a match; shorter ones predict next to nothing
_PRIORS = {2: 0.45, 3: 0.65, 4: 0.85, 5: 0.95}  # acceptance by kind; of sampled and greedy text, in the mean
_SHARES = (0.8, 0.2, 0.1, 0.05)  # of the chance of a suffix: of the tokens that followed it, by rank


class SuffixIndex:
    """Finds earlier occurrences of the longest suffix of a growing text: an online suffix automaton.

    Appending a token takes amortised constant time (Blumer et al., The smallest automaton recognizing the subwords of
    a text, 1985). A state represents all substrings that end at the same positions. Its link is the state of their
    longest suffix that occurs at more positions.

    Most states have one transition, so the first one is in lists, and only the others are in dictionaries.
    """

    def __init__(self) -> None:
        self.size = 0  # tokens
        # Lists of numbers that exist anyway, tokens and states, are as small as arrays, and faster.
        self._token, self._target = [_NONE], [_NONE]  # of each state's first transition
        self._more: dict[int, dict[int, int]] = {}  # the other transitions of a state: the target of each token
        self._link = [-1]
        self._length = array("i", [0])  # of a state's longest substring
        self._end = array("i", [-1])  # the last token of one of its occurrences
        self._last = 0  # the state of the whole text
        self._match = (0, 0)  # state and length of the longest suffix that had occurred before
        self._match_end = -1

    def append(self, token: int) -> None:
        tokens, targets, more, link, length = self._token, self._target, self._more, self._link, self._length
        state, target = self._last, -1
        new = self._new_state(length[state] + 1, 0, self.size)
        while state >= 0:  # from the whole text to ever shorter suffixes, up to one that the token has followed before
            first = tokens[state]
            if first == token:
                target = targets[state]
                break
            if first == _NONE:
                tokens[state], targets[state] = token, new
            elif (others := more.get(state)) is None:
                more[state] = {token: new}
            elif token in others:
                target = others[token]
                break
            else:
                others[token] = new
            state = link[state]
        match = 0
        if state >= 0:
            match = target if length[target] == length[state] + 1 else self._split(state, token, target)
            link[new] = match
        self._last = new
        # Of the earlier occurrences the latest known one: recent text is the best predictor.
        self._match, self._match_end = (match, length[match]), self._end[match]
        self._end[match] = self.size
        self.size += 1

    def _new_state(self, length: int, link: int, end: int) -> int:
        new = len(self._length)
        self._token.append(_NONE)
        self._target.append(_NONE)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """Split from `target`, to which `token` leads, a state whose longest substring is `state`'s and the token."""
        tokens, targets, more, link = self._token, self._target, self._more, self._link
        split = self._new_state(self._length[state] + 1, link[target], self._end[target])
        tokens[split], targets[split] = tokens[target], targets[target]
        if target in more:
            more[split] = more[target].copy()
        while state >= 0:
            if tokens[state] == token:
                if targets[state] != target:
                    break
                targets[state] = split
            elif (others := more[state])[token] == target:  # the token follows this suffix too
                others[token] = split
            else:
                break
            state = link[state]
        link[target] = split
        return split

    def _after(self, state: int, token: int) -> int:
        """Return the state that a token leads to, -1 if there is none."""
        if self._token[state] == token:
            return self._target[state]
        others = self._more.get(state)
        return -1 if others is None else others.get(token, -1)

    def following(self, state: int) -> dict[int, int]:
        """Return the states that tokens lead to from a state, by token."""
        first = self._token[state]
        return {} if first == _NONE else {first: self._target[state]} | self._more.get(state, {})

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
            while (after := self._after(state, token)) < 0 and state > 0:
                state = self._link[state]
                length = self._length[state]
            state, length = (0, 0) if after < 0 else (after, length + 1)
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
        best: dict[int, tuple[int, int, int]] = {}
        while length >= shortest and state > 0 and len(best) < len(_SHARES):
            after = self.following(state)
            latest = heapq.nlargest(len(_SHARES), after, key=lambda token: self._end[after[token]])
            for token in latest:
                best.setdefault(token, (token, after[token], length + 1))
            state = self._link[state]
            length = self._length[state]
        return list(best.values())[: len(_SHARES)]


class LookupDrafter:
    """Proposes the tokens that followed the longest repeated suffix of the sequence, with one-hot distributions."""

    name = "lookup"
    relative_cost = 0.0
    setups = 0
    branches = True
    longest = 24

    def __init__(self) -> None:
        self._index = SuffixIndex()
        self._marks: Watermarks | None = None  # of the sequence that is indexed

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        length, _ = self._match(sequence)
        return None if length < _SHORTEST else min(length.bit_length(), 5)  # 2-3, 4-7, 8-15, 16 and more

    def prior(self, kind: Hashable) -> float:
        return _PRIORS[int(str(kind))]

    def setup_cost(self, sequence: TokenSequence) -> float:
        return 0.0

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        length, position = self._match(sequence)
        if length < _SHORTEST:
            return NOTHING
        if tree is not None:
            tokens, parents = self._index.continuations(sequence.tentative, len(tree.parents), limit, _SHORTEST)
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
