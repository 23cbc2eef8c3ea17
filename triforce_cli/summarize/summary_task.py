"""One answer to generate about a document, and its steps."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from ..input.documents import Document
from ..output.turns import Section
from ..run.model_request import Prompt
from .instructions import AnswerStyle
from .map_reduce import MapReduce
from .passages import Passage, Steps


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to generate. `prompt` is None where the document is longer than the context."""

    section: Section
    document: Document
    ids: list[int]
    prompt: Prompt | None = None

    def packed(self) -> list[Any]:
        """Return the fields for JSON. The document's text goes along only where it is read in parts."""
        whole = self.prompt
        text, new_tokens = (self.document.text, None) if whole is None else ("", whole.new_tokens)
        return [astuple(self.section), self.document.name, text, self.tokens, new_tokens]

    @classmethod
    def unpacked(cls, section: list[Any], name: str, text: str, ids: list[int], new_tokens: int | None) -> Task:
        """Return the task of `packed`."""
        prompt = None if new_tokens is None else Prompt(ids, new_tokens, name)
        document, question, headings, file = section
        return cls(Section(document, question, tuple(headings), file), Document(name, text), ids, prompt)

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the prompt, or of the document that is to be read in parts."""
        return self.ids if self.prompt is None else self.prompt.ids


def steps(task: Task, reading: MapReduce, style: AnswerStyle) -> Steps:
    """Return the steps of an answer: its prompt's text, for a long document after notes on its parts."""
    prompt = task.prompt or (yield from reading.reduce(*texts(task, style), len(task.ids)))
    yield [Passage(prompt)]


def texts(task: Task, style: AnswerStyle) -> tuple[Document, str, str]:
    """Return the document, the instruction for notes on its parts, and the instruction for the answer."""
    question = task.section.question
    return task.document, style.note_taking(question), style.instruction(question)
