"""A conversation as data, and its file. Every change returns a new one. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offload.api.ask_options import join_texts
from offload.errors import PromptError, TriforceError
from offload.loading.tokenizers.chat_template import ASSISTANT, SYSTEM, USER, ChatMessage
from offload.short_repr import first_line
from offload.system.files import replace_file

from ..input.documents import Document, unreadable


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the model.

    Args:
        ids: the tokens that it wrote; None where they say more than the text, such as a stop string.
        reason: as `Summary.finish_reason`.
        seed: the seed of its draws.
    """

    text: str
    ids: tuple[int, ...] | None
    reason: str
    seed: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, the documents that came with it, and its answer."""

    question: str
    answer: Answer
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns so far, and the documents that come with the next question."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()
    waiting: tuple[Document, ...] = ()

    @property
    def documents(self) -> list[Document]:
        """All documents, in the order in which the model reads them."""
        return [*(document for turn in self.turns for document in turn.documents), *self.waiting]

    def messages(self, question: str) -> list[ChatMessage]:
        """Return the messages of the prompt that asks a further question."""
        found = [] if self.system is None else [ChatMessage(SYSTEM, self.system)]
        for turn in self.turns:
            found.append(ChatMessage(USER, _content(turn.documents, turn.question)))
            found.append(ChatMessage(ASSISTANT, turn.answer.text, turn.answer.ids))
        return [*found, ChatMessage(USER, _content(self.waiting, question))]

    def answered(self, question: str, answer: Answer) -> Conversation:
        """Return the conversation after another question, which took the waiting documents along."""
        return replace(self, turns=(*self.turns, Turn(question, answer, self.waiting)), waiting=())

    def added(self, document: Document) -> Conversation:
        """Return the conversation with a document that comes with the next question."""
        return replace(self, waiting=(*self.waiting, document))

    def undone(self) -> Conversation:
        """Return the conversation before its last question; the documents wait again. Raises PromptError."""
        if not self.turns:
            raise PromptError("there is no question yet", "ask something first")
        return replace(self, turns=self.turns[:-1], waiting=(*self.turns[-1].documents, *self.waiting))

    def cleared(self) -> Conversation:
        """Return the conversation with its documents alone."""
        return replace(self, turns=(), waiting=tuple(self.documents))


def _content(documents: Sequence[Document], question: str) -> str:
    """Return a user's message: as `triforce generate -f` joins files and a prompt."""
    return join_texts([*(document.text for document in documents), question])


_FORMAT = {"format": "triforce chat", "version": 1}


def save_conversation(path: Path, conversation: Conversation, model: str) -> None:
    """Write a conversation, with the texts of its documents. Raises TriforceError; the old file is then as it was."""
    content = _FORMAT | {"model": model, **asdict(conversation)}
    try:
        replace_file(path.resolve(), json.dumps(content, ensure_ascii=False, indent=1).encode("utf-8"), b"\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise TriforceError(f"the conversation cannot be saved in {path}: {reason}", "give another file") from error


def load_conversation(path: Path) -> Conversation:
    """Return the conversation of a file. Raises PromptError if it cannot be read or holds something else."""
    try:
        saved = json.loads(path.read_text("utf-8"))
        if {name: saved[name] for name in _FORMAT} != _FORMAT:
            raise ValueError("it is of another format, or version")
        system = None if saved["system"] is None else _text(saved["system"])
        return Conversation(system, tuple(map(_turn, saved["turns"])), _documents(saved["waiting"]))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "give a file that `/save` or --session of triforce chat has written"
        raise PromptError(f"{path} is no saved conversation: {first_line(error)}", hint) from None


def _turn(saved: Any) -> Turn:
    answer = saved["answer"]
    ids = None if answer["ids"] is None else tuple(map(int, answer["ids"]))
    kept = Answer(_text(answer["text"]), ids, _text(answer["reason"]), int(answer["seed"]))
    return Turn(_text(saved["question"]), kept, _documents(saved["documents"]))


def _documents(saved: Any) -> tuple[Document, ...]:
    return tuple(Document(_text(each["name"]), _text(each["text"])) for each in saved)


def _text(value: Any) -> str:
    """Return a text that can be encoded. Raises TypeError, ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    value.encode()
    return value
