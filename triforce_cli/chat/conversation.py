"""A conversation as data, and its file. Every change returns a new one. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.api.ask_options import join_texts
from offload.errors import PromptError, TriforceError
from offload.loading.tokenizers.chat_template import ASSISTANT, SYSTEM, USER, ChatMessage
from offload.short_repr import first_line
from offload.system.files import replace_file
from offload.units import counted

from ..input.documents import Document, unreadable

if TYPE_CHECKING:
    from offload.loading.tokenizers.tokenizer import Tokenizer

_VERSION = {"format": "triforce chat", "version": 2}


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, the documents that came with it, and its answer.

    `ids` are the tokens that the model wrote; None where they say more than the answer, such as a stop string.
    """

    question: str
    answer: str
    ids: tuple[int, ...] | None = None
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

    @property
    def contents(self) -> str:
        """The number of files and of questions, for the user."""
        return f"{counted(len(self.documents), 'file')}, {counted(len(self.turns), 'question')}"

    def messages(self, question: str) -> list[ChatMessage]:
        """Return the messages of the prompt that asks a further question, joined with files as by `generate -f`."""
        found = [] if self.system is None else [ChatMessage(SYSTEM, self.system)]
        for turn in (*self.turns, Turn(question, "", None, self.waiting)):
            content = join_texts([*(document.text for document in turn.documents), turn.question])
            found += [ChatMessage(USER, content), ChatMessage(ASSISTANT, turn.answer, turn.ids)]
        return found[:-1]

    def answered(self, question: str, answer: str, ids: tuple[int, ...] | None) -> Conversation:
        """Return the conversation after another question, which took the waiting documents along."""
        return replace(self, turns=(*self.turns, Turn(question, answer, ids, self.waiting)), waiting=())

    def added(self, document: Document) -> Conversation:
        """Return the conversation with a document that comes with the next question."""
        return replace(self, waiting=(*self.waiting, document))

    def undone(self) -> Conversation:
        """Return the conversation before its last question; the documents wait again. Raises PromptError."""
        if not self.turns:
            raise PromptError("there is no question yet", "ask something first")
        return replace(self, turns=self.turns[:-1], waiting=(*self.turns[-1].documents, *self.waiting))

    def with_ids_of(self, tokenizer: Tokenizer, vocabulary: int) -> Conversation:
        """Return the conversation without ids that are not the tokenizer's tokens of their answers."""

        def is_known(turn: Turn) -> bool:
            ids = turn.ids or ()
            return all(0 <= each < vocabulary for each in ids) and tokenizer.decode(ids) == turn.answer

        return replace(self, turns=tuple(each if is_known(each) else replace(each, ids=None) for each in self.turns))

    def cleared(self) -> Conversation:
        """Return the conversation with its documents alone."""
        return replace(self, turns=(), waiting=tuple(self.documents))


def save_conversation(path: Path, conversation: Conversation) -> None:
    """Write a conversation, with the texts of its documents. Raises TriforceError; the old file is then as it was."""
    text = json.dumps(_VERSION | asdict(conversation), ensure_ascii=False, indent=1)
    try:
        replace_file(path.resolve(), text.encode(), b"\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise TriforceError(f"the conversation cannot be saved in {path}: {reason}", "give another file") from error


def load_conversation(path: Path) -> Conversation:
    """Return the conversation of a file. Raises PromptError if it cannot be read or holds something else."""
    try:
        saved = json.loads(path.read_text("utf-8"))
        if {name: saved[name] for name in _VERSION} != _VERSION:
            raise ValueError("it is of another format, or version")
        system = None if saved["system"] is None else _text(saved["system"])
        return Conversation(system, tuple(map(_turn, saved["turns"])), _documents(saved["waiting"]))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "give a file that `/save` or --session of triforce chat has written"
        raise PromptError(f"{path} is not a saved conversation: {first_line(error)}", hint) from None


def _turn(saved: Any) -> Turn:
    ids = None if saved["ids"] is None else tuple(map(int, saved["ids"]))
    return Turn(_text(saved["question"]), _text(saved["answer"]), ids, _documents(saved["documents"]))


def _documents(saved: Any) -> tuple[Document, ...]:
    return tuple(Document(_text(each["name"]), _text(each["text"])) for each in saved)


def _text(value: Any) -> str:
    """Return a text that can be encoded. Raises TypeError, ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    value.encode()
    return value
