"""Sections of a longer output: answers about documents, and the parts from which one is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Section:
    """An answer's document and question. `headings` stand above it in text; `file` is the number of its output file."""

    document: str
    question: str | None
    headings: tuple[str, ...] = ()
    file: int = 0

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


def sections(names: list[str], questions: list[str | None], apart: bool = False) -> list[list[Section]]:
    """Return the section of each question, for each document; headings name what there are several of.

    `apart`: each document has a file of its own, which needs no heading with its name.
    """
    return [
        [
            Section(
                name,
                question,
                (
                    *([f"# {_one_line(name)}"] if len(names) > 1 and not index and not apart else []),
                    *([f"## {_one_line(question)}"] if len(questions) > 1 and question else []),
                ),
                number if apart else 0,
            )
            for index, question in enumerate(questions)
        ]
        for number, name in enumerate(names)
    ]


def _file_names(document: str) -> str:
    return ", ".join(Path(name).name for name in _one_line(document).split(", "))


def _one_line(text: str) -> str:
    return " ".join(text.split())
