"""Separates what a reasoning model thinks from its answer, as the text streams."""

from __future__ import annotations

from enum import Enum, auto

OPENING, CLOSING = "<think>", "</think>"


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


class _At(Enum):
    START = auto()  # of the text: it may begin with OPENING
    THINKING = auto()
    GAP = auto()  # between the thinking and the answer
    ANSWER = auto()


class Thinking:
    """Splits a text at <think> and </think>, whose marks and the blanks around them belong to neither part.

    Only a text's beginning can be thinking: an answer that writes about <think> stays whole.
    """

    marks: tuple[str, ...] = ()  # special tokens that have to be decoded

    def __init__(self, is_open: bool = False) -> None:
        """`is_open`: the prompt ends with <think>, as some chat templates write it, so the text begins by thinking."""
        self._at = _At.THINKING if is_open else _At.START
        self._pending = ""
        self._is_blank = True  # no thinking has been returned yet

    @property
    def is_open(self) -> bool:
        """Return whether what follows is thinking."""
        return self._at is _At.THINKING

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the answer that have become final; often "", never a part of a mark."""
        self._pending += text
        thought = answer = ""
        if self._at is _At.START:
            self._begin()
        if self._at is _At.THINKING:
            thought = self._think()
        if self._at is _At.GAP:
            self._pending = self._pending.lstrip()
            self._at = _At.ANSWER if self._pending else _At.GAP
        if self._at is _At.ANSWER:
            answer, self._pending = self._pending, ""
        return thought, answer

    def flush(self) -> tuple[str, str]:
        """Return what is pending at the end: it was no mark."""
        pending, self._pending = self._pending, ""
        return (pending.rstrip(), "") if self.is_open else ("", pending)

    def _begin(self) -> None:
        """Find out whether the text begins with thinking, as soon as it has enough characters to tell."""
        text = self._pending.lstrip()
        if text.startswith(OPENING):
            self._at, self._pending = _At.THINKING, text[len(OPENING) :]
        elif not OPENING.startswith(text):
            self._at = _At.ANSWER

    def _think(self) -> str:
        """Return the pending thinking up to CLOSING, without what may be its beginning, and without blanks at ends."""
        text = self._pending.lstrip() if self._is_blank else self._pending
        end = text.find(CLOSING)
        if end >= 0:
            thought, self._pending, self._at = text[:end].rstrip(), text[end + len(CLOSING) :], _At.GAP
        else:
            thought = text[: len(text) - overlap(text, CLOSING)].rstrip()
            self._pending = text[len(thought) :]
        self._is_blank = self._is_blank and not thought
        return thought
