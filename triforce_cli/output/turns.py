"""Sections of a longer output, in a fixed order: what comes early waits in memory for its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
        self.waiting: deque[Action] = deque()
        self.ended = False

    def __call__(self, action: Action) -> None:
        self.waiting.append(action)
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
        """Write the actions that wait of the first output, and of those behind it as far as they have ended."""
        while self._turns:
            turn = self._turns[0]
            self._write(turn)
            if not turn.ended:
                return
            self._turns.popleft()

    def flush(self) -> None:
        """Write everything that waits, also of outputs that have not ended, and no opening of an empty one."""
        while self._turns:
            turn = self._turns.popleft()
            if turn.waiting:
                self._write(turn)

    def _write(self, turn: Turn) -> None:
        opening, turn.opening = turn.opening, None
        if opening is not None:
            self._perform(opening)
        while turn.waiting:
            self._perform(turn.waiting.popleft())


@dataclass(frozen=True, slots=True)
class Section:
    """An answer's document and question. `headings` stand above it in text."""

    document: str
    question: str | None
    headings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name for people: the document, and the question if there is one."""
        name = _file_names(self.document)
        return name if self.question is None else f"{name}, {_one_line(self.question)}"


@dataclass(frozen=True, slots=True)
class Part:
    """One of the parts of a document that is read part by part; from `round` 2 on, a part of the notes."""

    number: int
    parts: int
    round: int
    document: str

    @property
    def label(self) -> str:
        """The name for people: `book.txt, part 2 of 7`."""
        later = f" of round {self.round}" if self.round > 1 else ""
        return f"{_file_names(self.document)}, part {self.number} of {self.parts}{later}"


def sections(names: list[str], questions: list[str | None]) -> list[list[Section]]:
    """Return the section of each question, for each document; headings name what there are several of."""
    return [
        [
            Section(
                name,
                question,
                (
                    *([f"# {_one_line(name)}"] if len(names) > 1 and not index else []),
                    *([f"## {_one_line(question)}"] if len(questions) > 1 and question else []),
                ),
            )
            for index, question in enumerate(questions)
        ]
        for name in names
    ]


def _file_names(document: str) -> str:
    return ", ".join(Path(name).name for name in _one_line(document).split(", "))


def _one_line(text: str) -> str:
    return " ".join(text.split())
