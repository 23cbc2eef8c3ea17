"""How much of the context a conversation takes, and what can be done where it is too much. Nothing is ever dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.errors import PromptError
from offload.units import counted

from .conversation import Conversation, Turn

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
