"""The steps of an answer: texts to generate, some of which need the texts of earlier steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..output.format import time_left
from ..output.renderers import StreamRenderer
from ..output.turns import Part, Section
from ..run.model_request import Prompt
from ..run.text_generator import TextGenerator
from .resume import FinishedParts


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to generate: the notes on a `part`, or the answer itself."""

    prompt: Prompt
    part: Part | None = None


# Yields passages that do not depend on each other, and is sent their texts; the last one is the answer.
Steps = Generator[Sequence[Passage], list[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to generate, by its steps."""

    section: Section
    steps: Steps


class PartsLeft:
    """The time that the parts of all documents still take, from those that this run has read."""

    def __init__(self, parts: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`parts` are to be read, besides further rounds."""
        self._parts, self._clock = parts, clock
        self._read = 0
        self._seconds = 0.0

    def label(self, part: Part) -> str:
        """Return a part's label with the time left, once a part has been read."""
        left = self._parts - self._read
        if not self._read or left < 1 or part.round > 1:
            return part.label
        return f"{part.label}, {time_left(left * self._seconds / self._read)}"

    @contextmanager
    def reading(self, part: Part) -> Iterator[None]:
        """Count a part that is read meanwhile."""
        started = self._clock()
        yield
        if part.round == 1:
            self._read, self._seconds = self._read + 1, self._seconds + self._clock() - started


def generate_in_order(
    answers: Iterable[Answer],
    generator: TextGenerator,
    finished: FinishedParts,
    renderer: StreamRenderer,
    left: PartsLeft,
) -> None:
    """Generate one text after the other. Raises what `TextGenerator.generate` and the steps raise."""
    for answer in answers:
        renderer.section(answer.section)
        texts = None
        while (passages := following(answer.steps, texts)) is not None:
            texts = [_text(passage, generator, finished, renderer, left) for passage in passages]


def following(steps: Steps, texts: list[str] | None) -> Sequence[Passage] | None:
    """Return the next passages of an answer after the texts of the last ones (None at first); None after all."""
    try:
        return steps.send(texts)
    except StopIteration:
        return None


def _text(
    passage: Passage, generator: TextGenerator, finished: FinishedParts, renderer: StreamRenderer, left: PartsLeft
) -> str:
    """Return the text of a passage; notes on a part are those of an earlier run, or new ones, which are saved."""
    if passage.part is None:
        return generator.generate(passage.prompt, renderer)
    text = finished.find(passage.prompt.ids)
    if text is not None:
        renderer.taken_over(passage.part, text)
        return text
    with left.reading(passage.part):
        text = generator.generate(passage.prompt, renderer.for_part(passage.part), left.label(passage.part))
    finished.save(passage.prompt.ids, text)
    return text
