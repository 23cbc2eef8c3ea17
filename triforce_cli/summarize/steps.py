"""The steps of an answer: texts to generate, some of which need the texts of earlier steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..output.format import time_left
from ..output.renderers import StreamRenderer
from ..output.turns import Part, Section
from ..run.generate import TextGenerator
from ..run.model_request import Prompt
from .resume import FinishedParts


@dataclass(frozen=True, slots=True)
class Job:
    """A text to generate: the notes on a `part`, or the answer itself."""

    prompt: Prompt
    part: Part | None = None


# Yields jobs that do not depend on each other, and is sent their texts; the last one is the answer.
Steps = Generator[Sequence[Job], list[str], None]


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
        while (jobs := following(answer.steps, texts)) is not None:
            texts = [_text(job, generator, finished, renderer, left) for job in jobs]


def following(steps: Steps, texts: list[str] | None) -> Sequence[Job] | None:
    """Return the next jobs of an answer after the texts of the last ones, None at first; None if there are no more."""
    try:
        return steps.send(texts)
    except StopIteration:
        return None


def _text(
    job: Job, generator: TextGenerator, finished: FinishedParts, renderer: StreamRenderer, left: PartsLeft
) -> str:
    """Return the text of a job; notes on a part are those of an earlier run, or new ones, which are saved."""
    if job.part is None:
        return generator.generate(job.prompt, renderer)
    text = finished.find(job.prompt.ids)
    if text is not None:
        renderer.taken_over(job.part, text)
        return text
    with left.reading(job.part):
        text = generator.generate(job.prompt, renderer.for_part(job.part), left.label(job.part))
    finished.save(job.prompt.ids, text)
    return text
