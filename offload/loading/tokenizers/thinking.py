"""Separates what a reasoning model thinks from its answer, as the text streams: by <think>, or by harmony's channels.

In the harmony format, which gpt-oss writes, a message is `<|channel|>NAME<|message|>TEXT<|end|>`, and the next one
begins with `<|start|>assistant` (cookbook.openai.com, "OpenAI harmony response format"). Channel `final` has the
answer; the others are thinking, but for calls of functions: `to=functions.NAME` before or after the channel.
"""

from enum import Enum, auto

OPENING, CLOSING = "<think>", "</think>"


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


class _At(Enum):
    START = auto()  # of the text: it may begin with OPENING
    THINKING = auto()
    GAP = auto()  # between the thinking and the answer
    ANSWER = auto()


class Thinking:
    """Splits a text at <think> and </think>, whose marks and the blanks around them belong to neither part.

    Only a text's beginning can be thinking: an answer that writes about <think> stays whole.
    """

    marks: tuple[str, ...] = (OPENING, CLOSING)  # that have to be decoded, if they are special tokens
    begins, ends = OPENING, CLOSING  # the thinking; after its end, blanks may stand before the answer
    has_gap = True

    def __init__(self, is_open: bool = False) -> None:
        """`is_open`: the prompt ends with <think>, as some chat templates write it, so the text begins by thinking."""
        self._at = _At.THINKING if is_open else _At.START
        self._pending = ""
        self._is_blank = True  # no thinking has been returned yet

    @property
    def is_open(self) -> bool:
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


START, CHANNEL, MESSAGE, END, CONSTRAIN = MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|constrain|>",
)
_FINAL = "final"
_BETWEEN = "\n\n"  # two messages of thinking


class _In(Enum):
    BEGINNING = auto()  # of the text: it may begin with a header
    HEADER = auto()  # of a message: nobody's text
    THINKING = auto()
    ANSWER = auto()
    PLAIN = auto()  # a text without channels: all of it is the answer


class Harmony:
    """Splits a text as `Thinking` does, by channels. Their marks are special tokens, which have to be decoded."""

    marks = MARKS
    begins, ends, has_gap = None, f"{CHANNEL}{_FINAL}{MESSAGE}", False  # every answer begins with headers

    def __init__(self) -> None:
        self._at = _In.BEGINNING
        self._pending = ""
        self._between = ""  # goes before the next thinking
        self._is_blank = True  # no thinking of this message has been returned yet

    @property
    def is_open(self) -> bool:
        """Return whether what follows is thinking, or the header of a message."""
        return self._at in (_In.THINKING, _In.HEADER)

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the answer that have become final; often "", never a part of a mark."""
        self._pending += text
        thought = answer = ""
        if self._at is _In.BEGINNING:
            self._begin()
        while True:
            at = self._at
            if at is _In.HEADER:
                self._read_header()
            elif at is _In.THINKING:
                thought += self._think()
            elif at is _In.ANSWER:
                answer += self._body()
            elif at is _In.PLAIN:
                answer, self._pending = self._pending, ""
            if self._at is at:
                return thought, answer

    def flush(self) -> tuple[str, str]:
        """Return what is pending at the end: it was no mark. A header that has not ended is dropped."""
        pending, self._pending = self._pending, ""
        if self._at is _In.HEADER:
            return "", ""
        return (self._spaced(pending.rstrip()), "") if self._at is _In.THINKING else ("", pending)

    def _begin(self) -> None:
        """Find out whether the text begins with a header, as soon as it has enough characters to tell."""
        text = self._pending.lstrip()
        if text.startswith((CHANNEL, START)):
            self._at = _In.HEADER
        elif not any(mark.startswith(text) for mark in (CHANNEL, START)):
            self._at = _In.PLAIN

    def _read_header(self) -> None:
        header, mark, rest = self._pending.partition(MESSAGE)
        if mark:
            self._at = _In.ANSWER if header.partition(CHANNEL)[2].startswith(_FINAL) else _In.THINKING
            self._pending, self._is_blank = rest, True

    def _think(self) -> str:
        """Return the pending thinking up to END, without blanks at its ends."""
        if self._is_blank:
            self._pending = self._pending.lstrip()
        body = self._body()
        thought = body.rstrip()
        if self._at is _In.THINKING:
            self._pending = body[len(thought) :] + self._pending
        return self._spaced(thought)

    def _spaced(self, thought: str) -> str:
        """Return thinking with what separates it from the message before."""
        if not thought:
            return ""
        if self._is_blank:
            thought, self._between = self._between + thought, _BETWEEN
        self._is_blank = False
        return thought

    def _body(self) -> str:
        """Return the pending text of a message up to END, without what may be its beginning."""
        body, mark, rest = self._pending.partition(END)
        if mark:
            self._at, self._pending = _In.HEADER, rest
            return body
        kept = len(self._pending) - overlap(self._pending, END)
        body, self._pending = self._pending[:kept], self._pending[kept:]
        return body
