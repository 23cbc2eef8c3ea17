"""The options of one question by name, what they come to, and its answer, in pieces or whole. Imports nothing heavy."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypedDict

from ..errors import TriforceError
from ..events import Event, Finished, Text
from ..settings.config import GenerationConfig, Sampling
from ..settings.constraint import Constraint
from ..settings.validation import require


def join_texts(texts: Sequence[str]) -> str:
    """Return texts as one, with one blank line at each joint; everything else is unchanged."""
    joined = texts[0]
    for text in texts[1:]:
        joined = joined.rstrip("\n") + "\n\n" + text.lstrip("\n")
    return joined


def places_in_joined(texts: Sequence[str]) -> list[int]:
    """Return where each text begins, in characters of `join_texts`, whose blank lines may hide its first ones."""
    places = [0]
    for before, text in itertools.pairwise(texts):
        end = places[-1] + len(before.rstrip("\n"))
        places.append(end + 2 - (len(text) - len(text.lstrip("\n"))))
    return places


class AskOptions(TypedDict, total=False):
    """Name the options of a question: those of Sampling and GenerationConfig, and how the prompt is rendered.

    What is left out, or None, is the model's own default. Without `max_new_tokens`, an answer has up to 512 tokens, or
    as many as the context has left. A `seed` couples the draws to it: it gives one text, whatever the method. Without
    one, each answer has its own. `stop` ends the answer before the first of these strings. The answer matches the
    `constraint`. `system` is the system message, and `think` switches the model's thinking on or off.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_range: int | None
    no_repeat_ngram: int | None
    coupled: bool | None
    constraint: Constraint | None
    max_new_tokens: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    system: str | None
    think: bool | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Options as the engine takes them. `is_limited`: the number of new tokens was given."""

    sampling: Sampling
    config: GenerationConfig
    system: str | None
    think: bool | None
    is_limited: bool


def resolve(options: Mapping[str, Any], model_default: Sampling) -> Asked:
    """Return what the options of one question come to. Raises SettingsError for unknown names and wrong values."""
    known = list(AskOptions.__annotations__)
    for name in options:
        close = get_close_matches(name, known, 1, 0.4)
        hint = f"did you mean {close[0]}?" if close else f"use some of: {', '.join(known)}"
        require(name in known, f"there is no option {name}", hint)
    given = {name: value for name, value in options.items() if value is not None}
    sampling = {field.name: given[field.name] for field in fields(Sampling) if field.name in given}
    config = {field.name: given[field.name] for field in fields(GenerationConfig) if field.name in given}
    if "seed" in given:
        sampling.setdefault("coupled", True)
    config.setdefault("seed", secrets.randbits(32))
    stop = given.get("stop", ())
    config["stop"] = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else stop
    think = given.get("think")
    require(think in (None, True, False), f"think is {think!r}", "use True or False, or leave it out")
    return Asked(
        model_default.overridden(sampling),
        GenerationConfig(**config),
        given.get("system"),
        think,
        "max_new_tokens" in given,
    )


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
