"""A conversation as data, its room in the context, and its file. Every change returns a new one. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offload.api.ask_options import join_texts
from offload.errors import PromptError, TriforceError
from offload.hardware.schema import InvalidValue
from offload.loading.tokenizers.chat_template import ASSISTANT, SYSTEM, USER, ChatMessage
from offload.short_repr import short_repr
from offload.system.files import Unbounded, read_bounded, replace_file
from offload.units import GIB, counted

from ..input.documents import Document, unreadable
from ..input.plain_values import build


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

    def forgotten(self, count: int) -> Conversation:
        """Return the conversation without its oldest questions and answers, with all of its documents."""
        dropped, kept = self.turns[:count], self.turns[count:]
        documents = tuple(document for turn in dropped for document in turn.documents)
        if not kept:
            return replace(self, turns=(), waiting=(*documents, *self.waiting))
        first = replace(kept[0], documents=(*documents, *kept[0].documents))
        return replace(self, turns=(first, *kept[1:]))

    def removed(self, name: str) -> Conversation:
        """Return the conversation without the documents of a name. Raises PromptError if there is none."""
        names = [document.name for document in self.documents]
        if name not in names:
            raise PromptError(f"there is no file {name} in this conversation", "/files lists them")
        turns = tuple(replace(turn, documents=_others(turn.documents, name)) for turn in self.turns)
        return replace(self, turns=turns, waiting=_others(self.waiting, name))


def _content(documents: Sequence[Document], question: str) -> str:
    """Return a user's message: as `triforce generate -f` joins files and a prompt."""
    return join_texts([*(document.text for document in documents), question])


def _others(documents: Sequence[Document], name: str) -> tuple[Document, ...]:
    return tuple(document for document in documents if document.name != name)


CONVERSATION = 8192  # tokens beside the documents for which memory is planned, if the context is not given
_LEAST_ANSWER = 16  # tokens; an answer that is cut before says nothing
_TEMPLATE = 8  # tokens of a turn, about, that the chat template adds


@dataclass(frozen=True, slots=True)
class Room:
    """The tokens that a conversation may have, its next answer included.

    Args:
        limit: tokens; None for a cache that forgets, which has no limit.
        context: the model's.
        count: returns the tokens of a text.
    """

    limit: int | None
    context: int
    count: Callable[[str], int]

    def answer_tokens(self, tokens: int, wanted: int) -> int:
        """Return how many tokens an answer may have: `wanted`, or what the prompt of `tokens` leaves; 0 for too few."""
        if self.limit is None:
            return wanted
        left = min(wanted, self.limit - tokens)
        return left if left >= min(wanted, _LEAST_ANSWER) else 0

    def refusal(self, what: str, tokens: int, conversation: Conversation, again: str) -> PromptError:
        """Return the error that `what` leaves no room for an answer, with what can be done before `again`."""
        excess = tokens + _LEAST_ANSWER - self.limit
        return PromptError(
            f"{what} {counted(tokens, 'token')}, which leaves no room for an answer in the context of {self.limit:,}; "
            "nothing was dropped",
            f"{self.choices(conversation, excess)}; then {again}",
        )

    def choices(self, conversation: Conversation, excess: int) -> str:
        """Return what frees at least `excess` tokens, as commands."""
        found = []
        freed = forgotten = 0
        for turn in conversation.turns:
            freed, forgotten = freed + self._tokens(turn), forgotten + 1
            if freed >= excess:
                break
        if forgotten and freed >= excess:
            which = "oldest question and its answer" if forgotten == 1 else f"{forgotten} oldest questions and answers"
            found.append(f"/forget {forgotten} drops the {which} (about {freed:,} tokens)")
        documents = conversation.documents
        if documents:
            longest = max(documents, key=lambda document: len(document.text))
            found.append(f"/remove {longest.name} drops that file (about {self.count(longest.text):,} tokens)")
        found.append("/save FILE keeps everything in a file")
        if self.limit < self.context:
            found.append(f"start with --context for more, up to the model's {self.context:,}")
        else:
            found.append("start with --extend-context for more")
        return "; ".join(found)

    def _tokens(self, turn: Turn) -> int:
        """Return about how many tokens a turn takes without its documents."""
        answer = self.count(turn.answer.text) if turn.answer.ids is None else len(turn.answer.ids)
        return self.count(turn.question) + answer + _TEMPLATE


_FORMAT, _VERSION = "triforce chat", 1
_HINT = "give a file that `/save` or --session of triforce chat has written"


@dataclass(frozen=True, kw_only=True)
class _Saved(Conversation):
    """A conversation as a file has it."""

    format: str
    version: int
    model: str

    def __post_init__(self) -> None:
        if (self.format, self.version) != (_FORMAT, _VERSION):
            what = f"it is of format {short_repr(self.format)}, version {short_repr(self.version)}"
            raise InvalidValue((), what, _HINT)


def save_conversation(path: Path, conversation: Conversation, model: str) -> None:
    """Write a conversation, with the texts of its documents. Raises TriforceError; the old file is then as it was."""
    content = {"format": _FORMAT, "version": _VERSION, "model": model, **asdict(conversation)}
    target = path.resolve()
    try:
        replace_file(target, json.dumps(content, ensure_ascii=False, indent=1).encode("utf-8"), b"\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise TriforceError(f"the conversation cannot be saved in {path}: {reason}", "give another file") from error


def load_conversation(path: Path) -> Conversation:
    """Return the conversation of a file. Raises PromptError if it cannot be read or holds something else."""
    try:
        with path.open("rb", buffering=0) as file:
            content = json.loads(read_bounded(file, GIB).decode("utf-8"))
        json.dumps(content, ensure_ascii=False).encode("utf-8")  # refuses halves of surrogate pairs
    except Unbounded as error:
        raise PromptError(f"{path} {error}", _HINT) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:  # also of UTF-8
        raise PromptError(f"{path} is no saved conversation: {error}", _HINT) from None
    try:
        saved = build(_Saved, content)
    except InvalidValue as error:
        raise PromptError(f"{path} is no saved conversation: {error.message}", _HINT) from None
    return Conversation(saved.system, saved.turns, saved.waiting)
