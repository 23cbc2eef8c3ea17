"""Which tokens with log-probabilities belong to the text that is emitted, and where in it each begins."""

from collections import deque
from itertools import takewhile

from ...events import Logprobs, ScoredToken


class ScoredText:
    """Holds scored tokens back until their text has been emitted, which may wait for the end of a stop string.

    Characters are counted as they become the answer's: those of a character's first tokens belong to its last one.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[ScoredToken, int]] = deque()  # each with where its text ends, in order
        self._known = self._emitted = 0  # characters of the answer: decoded, and let through

    def feed(self, token: int, logprobs: Logprobs, known: int, emitted: int) -> None:
        """Add a token, with which `known` characters of the answer became known, and `emitted` were let through."""
        scored = ScoredToken(token, self._known, logprobs)
        self.advance(known, emitted)
        self._waiting.append((scored, self._known))

    def advance(self, known: int, emitted: int) -> None:
        """Count characters that belong to no further token."""
        self._known, self._emitted = self._known + known, self._emitted + emitted

    def drop_silent(self) -> None:
        """Drop the tokens that wait without any text: what they are the beginning of is no part of the answer."""
        self._waiting = deque((each, end) for each, end in self._waiting if each.offset < end)

    def emitted(self) -> tuple[ScoredToken, ...]:
        """Return, once, the tokens whose text has been emitted."""
        if not self._waiting:
            return ()
        done = takewhile(lambda item: item[0].offset < self._emitted and item[1] <= self._emitted, self._waiting)
        return self._take(sum(1 for _ in done))

    def cut(self) -> tuple[ScoredToken, ...]:
        """Return the tokens of which at least a part has been emitted: a stop string ends the text there."""
        found = self._take(sum(each.offset < self._emitted for each, _ in self._waiting))
        self._waiting.clear()
        return found

    def rest(self) -> tuple[ScoredToken, ...]:
        """Return the tokens that wait at the end, which no stop string has cut."""
        return self._take(len(self._waiting))

    def _take(self, count: int) -> tuple[ScoredToken, ...]:
        return tuple(self._waiting.popleft()[0] for _ in range(count))
