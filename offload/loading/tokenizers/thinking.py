"""Separates what a reasoning model thinks from its answer, as the text streams.

In the harmony format, which gpt-oss writes, a message is `<|channel|>NAME<|message|>TEXT<|end|>`, and the next one
begins with `<|start|>assistant` (cookbook.openai.com, "OpenAI harmony response format"). Channel `final` has the
answer; the others are thinking. The other formats have marks around the thinking.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

OPENING, CLOSING = "<think>", "</think>"
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_FINAL = "final"
_BETWEEN = "\n\n"  # two messages of thinking


class ThinkingFormat(NamedTuple):
    """How a model marks its thinking.

    Args:
        opening, closing: stand around the thinking. A template that has one of them writes this format.
        label: follows the opening and is not part of the thinking.
        answer: stand around the answer.
        has_messages: whether thinking and answers are messages of the harmony format.
    """

    opening: str
    closing: str
    label: str = ""
    answer: tuple[str, str] = ("", "")
    has_messages: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all marks; they have to be decoded, although they may be special tokens."""
        more = (_START, _MESSAGE, "<|constrain|>") if self.has_messages else self.answer
        return (self.opening, self.closing, *more)

    @property
    def is_free(self) -> bool:
        """Return whether an answer may begin without the marks of the format."""
        return not self.has_messages and not self.answer[0]

    @property
    def ends(self) -> re.Pattern[bytes]:
        """Return what an answer follows that is bound to a schema."""
        if self.has_messages:
            return re.compile(rb"<\|channel\|>\s*final[^<]*(<\|constrain\|>[^<]*)?<\|message\|>")
        return re.compile(re.escape((self.answer[0] or self.closing).encode()))


TAGS = ThinkingFormat(OPENING, CLOSING)
HARMONY = ThinkingFormat(_CHANNEL, "<|end|>", has_messages=True)
FORMATS = (
    HARMONY,
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    ThinkingFormat("<|channel>", "<channel|>", label="thought"),  # Gemma 4
    ThinkingFormat("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThinkingFormat("<seed:think>", "</seed:think>"),
    TAGS,
)


def thinking_format(template: str) -> ThinkingFormat | None:
    """Return how the model of a chat template thinks; None: it does not."""

    def writes(form: ThinkingFormat) -> bool:  # <|end|> alone ends messages of Phi and others
        return form.opening in template or (form.closing in template and not form.has_messages)

    return next(filter(writes, FORMATS), None)


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


class _At(Enum):
    START = auto()  # of the text: it may begin with thinking
    HEADER = auto()  # of a message
    THINKING = auto()
    GAP = auto()  # between the thinking and the answer
    ANSWER = auto()


class Thinking:
    """Splits a text into thinking and answer. The marks, and blanks around thinking, belong to neither.

    Only a text's beginning can be thinking: an answer that writes about <think> stays whole.
    """

    def __init__(self, form: ThinkingFormat = TAGS, is_open: bool = False) -> None:
        """`is_open`: the prompt ends with <think>, as some chat templates write it, so the text begins by thinking."""
        self.form = form
        self._at = _At.THINKING if is_open else _At.START
        self._pending = ""
        self._is_blank = True  # no thinking of this message has been returned yet
        self._between = ""  # goes before the next thinking
        self._answer_end = ""

    @property
    def is_open(self) -> bool:
        """Return whether what follows is thinking, or the header of a message."""
        return self._at in (_At.THINKING, _At.HEADER)

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the answer that have become final; often "", never a part of a mark."""
        self._pending += text
        thought, answer, before = "", "", None
        while before is not self._at:
            before = self._at
            if before in (_At.START, _At.GAP):
                self._begin()
            elif before is _At.HEADER:
                self._read_header()
            elif before is _At.THINKING:
                thought += self._think()
            else:
                answer += self._until(self._answer_end, _At.HEADER if self.form.has_messages else _At.GAP)
        return thought, answer

    def flush(self) -> tuple[str, str]:
        """Return the pending text at the end: it was no mark. A header that has not ended is dropped."""
        pending, self._pending = self._pending, ""
        if self._at is _At.HEADER:
            return "", ""
        return (self._spaced(pending.rstrip()), "") if self._at is _At.THINKING else ("", pending)

    def _begin(self) -> None:
        """Find out whether thinking or an answer begins, as soon as there are enough characters to tell."""
        text, form = self._pending.lstrip(), self.form
        openings: tuple[str, ...] = ()
        if self._at is _At.START:
            openings = (_START, form.opening) if form.has_messages else (form.opening + form.label,)
        answer_opening, answer_end = form.answer
        self._pending = self._pending if self._at is _At.START else text
        if text.startswith(openings):
            if form.has_messages:
                self._at, self._answer_end = _At.HEADER, form.closing
            else:
                self._at, self._pending = _At.THINKING, text[len(openings[0]) :]
        elif answer_opening and text.startswith(answer_opening):
            self._at, self._answer_end, self._pending = _At.ANSWER, answer_end, text[len(answer_opening) :]
        elif not any(mark.startswith(text) for mark in (*openings, answer_opening)):
            self._at = _At.ANSWER

    def _read_header(self) -> None:
        header, mark, body = self._pending.partition(_MESSAGE)
        if mark:
            is_answer = header.partition(_CHANNEL)[2].lstrip().startswith(_FINAL)
            self._at = _At.ANSWER if is_answer else _At.THINKING
            self._pending, self._is_blank = body, True

    def _think(self) -> str:
        """Return the pending thinking up to its end, without blanks around it."""
        if self._is_blank:
            self._pending = self._pending.lstrip()
        body = self._until(self.form.closing, _At.HEADER if self.form.has_messages else _At.GAP)
        thought = body.rstrip()
        if self._at is _At.THINKING:
            self._pending = body[len(thought) :] + self._pending
        return self._spaced(thought)

    def _spaced(self, thought: str) -> str:
        """Return thinking with what separates it from the message before."""
        if thought and self._is_blank:
            thought, self._between = self._between + thought, _BETWEEN
            self._is_blank = False
        return thought

    def _until(self, mark: str, following: _At) -> str:
        """Return the pending text up to a mark, "" for none, without what may be its beginning."""
        body, found, after = self._pending.partition(mark) if mark else (self._pending, "", "")
        if found:
            self._at, self._pending = following, after
            return body
        kept = len(body) - overlap(body, mark)
        self._pending = body[kept:]
        return body[:kept]
