"""Answers as their callers get them: pieces of text while they come, or whole ones of a batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from ..errors import TriforceError
from ..events import Event, Finished, Text


class Answer(Iterator[str]):
    """Iterate over an answer's text, piece by piece as it becomes final.

    A piece is whole characters, valid as UTF-8, and no part of a stop string; what a reasoning model thinks is left
    out. It is generated while it is read; closing it, or dropping it, ends it and keeps what was read. The iterator
    raises TriforceError, once, and ends.

    Attributes:
        finish_reason: "eos", "stop" or "length" at the end; None before, and after `close`.
    """

    def __init__(self, events: Generator[Event, None, None]) -> None:
        self._events = events
        self.finish_reason: str | None = None

    def __next__(self) -> str:
        for event in self.events():
            if isinstance(event, Text) and event.text:
                return event.text
        raise StopIteration

    def events(self) -> Iterator[Event]:
        """Yield the events that are left, in order: Prefilled, Speculated, Tokens, Text, Thought, Finished and others.

        Text has the pieces that the iterator returns. Raises TriforceError.
        """
        while (event := next(self._events, None)) is not None:
            if isinstance(event, Finished):
                self.finish_reason = event.reason
            yield event

    def read(self) -> str:
        """Return the text that is left, when it is complete. Raises TriforceError."""
        return "".join(self)

    def close(self) -> None:
        """End the answer where it is, and leave its caches to the next one."""
        self._events.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Hold one answer of a batch, whole: the `index` of its prompt, counted from 0, and its text.

    `finish_reason` is "eos", "stop" or "length"; None with an `error`, and then the text is what there was before it.
    """

    index: int
    text: str
    finish_reason: str | None
    error: TriforceError | None = None
