"""Answers in a fixed order, and their names: what comes early waits in memory for its turn."""

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
    """The output of one of several answers. The first that has not ended is written as it comes; the others wait."""

    def __init__(self, turns: deque[Turn], opening: Action) -> None:
        """`turns` has the outputs that have not been written whole, in order; `opening` is written first."""
        self._turns, self._waiting, self._has_ended = turns, deque([opening]), False
        turns.append(self)
        self._advance()

    def __call__(self, action: Action) -> None:
        """Perform an action of output, now or when its turn has come."""
        self._waiting.append(action)
        self._advance()

    def end(self) -> None:
        """End the output: the next one's turn has come if this was the first."""
        self._has_ended = True
        self._advance()

    def flush(self) -> None:
        """Write what waits, unless that is the opening alone."""
        if len(self._waiting) > 1:
            self._write()

    def _advance(self) -> None:
        while self._turns:
            self._turns[0]._write()
            if not self._turns[0]._has_ended:
                return
            self._turns.popleft()

    def _write(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


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
