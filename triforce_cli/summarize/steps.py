"""The steps of an answer: texts to generate, some of which need the texts of earlier steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from ..output.renderers import StreamRenderer
from ..output.sections import Part, Section
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


def generate_in_order(
    answers: Iterable[Answer], generator: TextGenerator, finished: FinishedParts, renderer: StreamRenderer
) -> None:
    """Generate one text after the other. Raises what `TextGenerator.generate` and the steps raise."""
    for answer in answers:
        renderer.section(answer.section)
        texts = None
        while (jobs := following(answer.steps, texts)) is not None:
            texts = [_text(job, generator, finished, renderer) for job in jobs]


def following(steps: Steps, texts: list[str] | None) -> Sequence[Job] | None:
    """Return the next jobs of an answer after the texts of the last ones, None at first; None if there are no more."""
    try:
        return steps.send(texts)
    except StopIteration:
        return None


def _text(job: Job, generator: TextGenerator, finished: FinishedParts, renderer: StreamRenderer) -> str:
    """Return the text of a job; notes on a part are those of an earlier run, or new ones, which are saved."""
    if job.part is None:
        return generator.generate(job.prompt, renderer)
    text = finished.find(job.prompt.ids)
    if text is not None:
        renderer.taken_over(job.part, text)
        return text
    text = generator.generate(job.prompt, renderer.for_part(job.part), job.part.label)
    finished.save(job.prompt.ids, text)
    return text
