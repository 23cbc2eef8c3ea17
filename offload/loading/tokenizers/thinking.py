"""Separates what a reasoning model thinks from its answer, as the text streams: by <think>, or by harmony's channels.

In the harmony format, which gpt-oss writes, a message is `<|channel|>NAME<|message|>TEXT<|end|>`, and the next one
begins with `<|start|>assistant` (cookbook.openai.com, "OpenAI harmony response format"). Channel `final` has the
answer; the others are thinking.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

OPENING, CLOSING = "<think>", "</think>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_FINAL = "final"
_BETWEEN = "\n\n"  # two messages of thinking


class ThinkingFormat(NamedTuple):
    """How a model marks its thinking.

    Args:
        marks: texts that have to be decoded, although they may be special tokens.
        openings: one of them begins a text with thinking.
        closing: ends the thinking.
        has_messages: whether thinking and answers are messages with headers, each of which `closing` ends.
        begins: begins the thinking before an answer that is bound to a schema; None: every answer begins with it.
        ends: ends that thinking.
    """

    marks: tuple[str, ...]
    openings: tuple[str, ...]
    closing: str
    has_messages: bool
    begins: str | None
    ends: str

    @property
    def has_gap(self) -> bool:
        """Return whether blanks may stand between the thinking and the answer."""
        return not self.has_messages


TAGS = ThinkingFormat((OPENING, CLOSING), (OPENING,), CLOSING, False, OPENING, CLOSING)
HARMONY = ThinkingFormat(
    (START, CHANNEL, MESSAGE, END, "<|constrain|>"), (CHANNEL, START), END, True, None, f"{CHANNEL}{_FINAL}{MESSAGE}"
)


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

    def __init__(self, is_open: bool = False, form: ThinkingFormat = TAGS) -> None:
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
            if before is _At.START:
                self._begin()
            elif before is _At.HEADER:
                self._read_header()
            elif before is _At.THINKING:
                thought += self._think()
            elif before is _At.GAP:
                self._pending = self._pending.lstrip()
                self._at = _At.ANSWER if self._pending else _At.GAP
            else:
                answer += self._until(self._answer_end, _At.HEADER)
        return thought, answer

    def flush(self) -> tuple[str, str]:
        """Return the pending text at the end: it was no mark. A header that has not ended is dropped."""
        pending, self._pending = self._pending, ""
        if self._at is _At.HEADER:
            return "", ""
        return (self._spaced(pending.rstrip()), "") if self._at is _At.THINKING else ("", pending)

    def _begin(self) -> None:
        """Find out whether the text begins with thinking, as soon as it has enough characters to tell."""
        text, openings = self._pending.lstrip(), self.form.openings
        if text.startswith(openings) and self.form.has_messages:
            self._at, self._answer_end = _At.HEADER, self.form.closing
        elif text.startswith(openings):
            self._at, self._pending = _At.THINKING, text[len(openings[0]) :]
        elif not any(mark.startswith(text) for mark in openings):
            self._at = _At.ANSWER

    def _read_header(self) -> None:
        header, mark, body = self._pending.partition(MESSAGE)
        if mark:
            is_answer = header.partition(CHANNEL)[2].startswith(_FINAL)
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
