"""Outputs of sequences that run together, in a fixed order: what comes early waits in memory for its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Action = Callable[[], object]
Perform = Callable[[Action], object]


def at_once(action: Action) -> None:
    """Perform an action of output."""
    action()


class Turn:
    """The output of one of several sequences. Called with an action, it performs it now or when its turn has come."""

    def __init__(self, turns: Turns, opening: Action | None) -> None:
        self._turns = turns
        self.opening = opening
        self.held: deque[Action] = deque()
        self.ended = False

    def __call__(self, action: Action) -> None:
        self.held.append(action)
        self._turns.advance()

    def end(self) -> None:
        """End the output: the next one's turn has come if this was the first."""
        self.ended = True
        self._turns.advance()


class Turns:
    """The outputs of several sequences. The first one that has not ended is written as it comes."""

    def __init__(self, perform: Perform = at_once) -> None:
        self._perform = perform
        self._turns: deque[Turn] = deque()

    def add(self, opening: Action | None = None) -> Turn:
        """Return the output of a further sequence, behind the others. The `opening` is written first."""
        turn = Turn(self, opening)
        self._turns.append(turn)
        self.advance()
        return turn

    def advance(self) -> None:
        """Write what is held of the first output, and of those behind it as far as they have ended."""
        while self._turns:
            turn = self._turns[0]
            self._write(turn)
            if not turn.ended:
                return
            self._turns.popleft()

    def flush(self) -> None:
        """Write all that is held, also of outputs that have not ended, and nothing of those that hold nothing."""
        while self._turns:
            turn = self._turns.popleft()
            if turn.held:
                self._write(turn)

    def _write(self, turn: Turn) -> None:
        opening, turn.opening = turn.opening, None
        if opening is not None:
            self._perform(opening)
        while turn.held:
            self._perform(turn.held.popleft())
