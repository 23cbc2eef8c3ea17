"""A conversation with a loaded model: asks, and keeps what was said."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import PromptError, typed_error
from offload.loading.tokenizers.tokenizer import Encoded
from offload.units import counted

from ..output.renderers import Renderer, tokenizing
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..run.generation import Generation
from ..run.opened_request import OpenedRequest, Prompt
from ..run.run import Run
from .conversation import Conversation, save_conversation

ANY_QUESTION = "?"  # to count tokens with: some templates take no empty message
_MOST_UNSHOWN = 64  # tokens at the end of an answer that its text may lack
_LEAST_ANSWER = 16  # tokens; an answer that is cut before says nothing


@dataclass(slots=True)
class Replies:
    """Says what is not an answer of the model: on stderr, or as JSON lines on stdout. `quiet` leaves out notes."""

    terminal: Terminal
    renderer: Renderer
    in_json: bool
    quiet: bool
    answers: int = 0

    def reply(self, command: str, *lines: str) -> None:
        if not self._in_json_line(type="reply", command=command, lines=lines):
            for line in lines:
                self.terminal.note(line)

    def note(self, text: str) -> None:
        """Say what the user should know."""
        if not self._in_json_line(type="note", text=text) and not self.quiet:
            self.terminal.note(text)

    def failed(self, error: Exception) -> None:
        """Say which exception ended an answer or a command, and what to do; the conversation goes on."""
        self.renderer.hide()
        self.terminal.trace(error)
        typed = typed_error(error)
        if not self._in_json_line(type="error", message=typed.message, hint=typed.hint):
            self.terminal.error(typed.message, typed.hint)

    def question(self, number: int, text: str) -> None:
        """Begin the answer to a question, the `number`-th of the conversation."""
        is_together = self.terminal.stdin_is_terminal and self.terminal.stdout_is_terminal
        if not self._in_json_line(type="question", number=number, text=text) and self.answers and not is_together:
            self.terminal.write("\n")  # between two answers without the questions
        self.answers += 1

    def _in_json_line(self, **fields: Any) -> bool:
        """Erase what is drawn; return whether output is JSON, and the fields have been written as a line of it."""
        self.renderer.hide()
        if self.in_json:
            self.terminal.write(json_line(**fields))
        return self.in_json


class ChatSession:
    """A conversation under way, of up to `limit` tokens (None for a cache that forgets), saved after each answer.

    `conversation` is what the next prompt consists of; it may be replaced at any time.
    """

    def __init__(
        self,
        opened: OpenedRequest,
        run: Run,
        replies: Replies,
        limit: int | None,
        conversation: Conversation,
        path: Path | None,
    ) -> None:
        self.opened, self._run, self.replies, self._limit = opened, run, replies, limit
        self.conversation, self._path = conversation, path
        self._known: Encoded = {}

    @property
    def used(self) -> str:
        """The tokens of the conversation so far, and their limit. Raises PromptError."""
        return f"{len(self._encode(ANY_QUESTION)):,}" + ("" if self._limit is None else f"/{self._limit:,}")

    def change(self, command: str, conversation: Conversation) -> None:
        """Go on with another conversation, by a command. Raises PromptError if it leaves no room."""
        self._room(len(self._encode(ANY_QUESTION, conversation)))
        self.conversation = conversation
        self.replies.reply(command, conversation.contents)

    def ask(self, question: str) -> None:
        """Answer a question, and keep what was said, also after Ctrl-C; not the beginning of an answer that failed.

        Raises PromptError where there is no room for an answer, and as `Run.generate`.
        """
        ids, wanted = self._encode(question), self.opened.settings.generation.max_new_tokens
        new_tokens = self._room(len(ids))
        if new_tokens < wanted:
            left = f"the context leaves {counted(new_tokens, 'token')} for this answer, not {wanted:,}"
            self.replies.note(f"{left}: /undo and /clear free some, and --context has more")
        self.replies.question(len(self.conversation.turns) + 1, question)
        documents = self.conversation.documents
        prompt = Prompt(ids, new_tokens, documents[0].name if documents else question)
        self._run.prepare(self.replies.renderer)
        generation = self._run.begin(prompt, self.replies.renderer)
        self._run.finish_writing(generation, lambda: self._keep(question, generation))

    def save(self, path: Path) -> None:
        """Save the conversation. Raises TriforceError."""
        try:
            save_conversation(path, self.conversation)
        except (KeyboardInterrupt, SystemExit):  # the whole answer was shown
            save_conversation(path, self.conversation)
            raise

    def _room(self, tokens: int) -> int:
        """Return how many tokens an answer to a prompt of so many may have. Raises PromptError for too few."""
        wanted = self.opened.settings.generation.max_new_tokens
        left = wanted if self._limit is None else min(wanted, self._limit - tokens)
        if left >= min(wanted, _LEAST_ANSWER):
            return left
        raise PromptError(
            f"the conversation would have {counted(tokens, 'token')}, which leaves no room for an answer in the "
            f"context of {self._limit:,}; nothing was dropped",
            "/save FILE keeps all; /undo drops the last question, /clear all of them; or start with a larger "
            "--context, or --extend-context",
        )

    def _encode(self, question: str, conversation: Conversation | None = None) -> list[int]:
        messages = (self.conversation if conversation is None else conversation).messages(question)
        progress = tokenizing(self.replies.renderer)
        return self.opened.model.tokenizer.chat_turns(messages, progress, self._known, self.opened.think)

    def _keep(self, question: str, generation: Generation) -> None:
        """Add an answer to the conversation, unless it was interrupted before it began."""
        text, ids = generation.meter.text, generation.meter.ids
        if text or generation.has_ended:
            # The last tokens may be a stop string, or those whose text Ctrl-C has kept from being shown.
            counts = range(len(ids), max(len(ids) - _MOST_UNSHOWN, -1), -1)
            decode = self.opened.model.tokenizer.decode
            shown = next((tuple(ids[:count]) for count in counts if decode(ids[:count]) == text), None)
            self.conversation = self.conversation.answered(question, text, shown)
            if self._path is not None:
                self.save(self._path)
