"""The interface of what follows an answer token by token and says which tokens may come next; and llguidance's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..errors import TriforceError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ..loading.tokenizers.thinking import Thinking

Allowed = np.ndarray  # bool [vocab]: which tokens may come next


class Matcher(Protocol):
    """The state of a constraint after some tokens. It depends on these tokens alone."""

    def consume(self, token: int) -> bool:
        """Go on by a token; return whether the constraint allows it. Raises TriforceError at its limits."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""

    def allowed(self) -> Allowed | None:
        """Return which tokens may come next, ends among them; None: all but those. Raises TriforceError: none may."""


class GrammarMatcher:
    """A grammar of llguidance.

    Where the grammar dictates the next characters, the only token that it allows is that of the tokenizer's own
    encoding of them: so a mask with one token is common, and no other spelling of a key competes with the usual one.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        """Take a matcher that has consumed nothing, and leave it so."""
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._consumed: list[int] = []

    def fork(self) -> GrammarMatcher:
        """Return another matcher, at the beginning of an answer."""
        return GrammarMatcher(self._fresh)

    def consume(self, token: int) -> bool:
        is_allowed = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        if is_allowed:
            self._consumed.append(token)
        return is_allowed

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            del self._consumed[-count:]

    def allowed(self) -> Allowed:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(bool)

    def _check(self) -> None:
        """Raise TriforceError at a dead end, or beyond a limit of the parser's; the matcher is as it was before."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            self._matcher = self._fresh.deep_copy()  # one with an error cannot be rolled back
            self._matcher.consume_tokens(self._consumed)
            raise TriforceError(f"the constraint allows no way on: {reason}", "simplify the schema or the grammar")


class _Place(NamedTuple):
    """Where `AfterThinking` is: the end of what is `thought`, None in the answer; tokens of it that are `consumed`."""

    thought: bytes | None
    consumed: int = 0
    is_gap: bool = False


_LONGEST_END = 128  # bytes of the marks between the thinking and the answer


class AfterThinking:
    """Constrains what comes after the thinking of a reasoning model, which is free.

    Between the two may be one token of blanks, as models write it, where the answer has no mark of its own.
    """

    def __init__(self, matcher: Matcher, tokens: Sequence[bytes], thinking: Thinking) -> None:
        form = thinking.form
        may_open = form.is_free and not thinking.is_open  # else the answer begins with marks, or within the thinking
        self._matcher, self._tokens, self._end, self._has_gap = matcher, tokens, form.ends, form.is_free
        self._opens = np.array([may_open and each == form.opening.encode() for each in tokens])
        self._blanks = np.array([bool(each) and not each.strip() for each in tokens])
        self._at = [_Place(None if may_open else b"")]

    def consume(self, token: int) -> bool:
        place = self._at[-1]
        if place.thought is not None:
            thought = place.thought + self._tokens[token]
            ended = _Place(None, is_gap=self._has_gap)
            self._at.append(ended if self._end.search(thought) else _Place(thought[-_LONGEST_END:]))
        elif (free := self._free(place)) is not None and free[token]:
            self._at.append(_Place(None if place.is_gap else b""))
        elif self._matcher.consume(token):
            self._at.append(_Place(None, place.consumed + 1))
        else:
            return False
        return True

    def rollback(self, count: int) -> None:
        before = self._at[-1].consumed
        if count:
            del self._at[-count:]
        self._matcher.rollback(before - self._at[-1].consumed)

    def allowed(self) -> Allowed | None:
        place = self._at[-1]
        if place.thought is not None:
            return None
        allowed, free = self._matcher.allowed(), self._free(place)
        if allowed is None or free is None:
            return allowed
        allowed = allowed.copy()
        count = min(len(free), len(allowed))
        allowed[:count] |= free[:count]
        return allowed

    def _free(self, place: _Place) -> Allowed | None:
        """Return the tokens that may stand before the answer: the beginning of the thinking, or blanks after it."""
        if len(self._at) == 1:
            return self._opens
        return self._blanks if place.is_gap else None
