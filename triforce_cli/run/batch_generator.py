"""Texts for several prompts together, over one loaded model, and how many of them ran at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass

from offload.batching.batch import Failed
from offload.batching.request import BatchRequest
from offload.errors import TriforceError
from offload.events import Event
from offload.metrics import Meter
from offload.units import counted

from ..output.format import duration, rate
from ..output.renderers import Renderer
from .model_request import ModelRequest, Prompt
from .text_generator import TextGenerator, TextRun


@dataclass(frozen=True, slots=True)
class Together:
    """How many sequences ran at a time, while one of them did: the mean over its time, and the most."""

    mean: float
    most: int


@dataclass(slots=True)
class _Span:
    began: float
    area: float  # sequences times seconds, until it began
    most: int


class Concurrency:
    """Counts the sequences that run, from when each enters until it leaves."""

    def __init__(self) -> None:
        self._running: dict[Hashable, _Span] = {}
        self._at = time.perf_counter()
        self._area = self._busy = 0.0  # sequences times seconds, and seconds with any
        self._most = 0

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, key: Hashable) -> None:
        """Count a sequence from now on."""
        now = self._advance()
        self._running[key] = _Span(now, self._area, 0)
        for span in self._running.values():
            span.most = max(span.most, len(self._running))
        self._most = max(self._most, len(self._running))

    def leave(self, key: Hashable) -> Together:
        """Count a sequence no longer; return what ran beside it, itself included."""
        now = self._advance()
        span = self._running.pop(key)
        return Together(_mean(self._area - span.area, now - span.began, span.most), span.most)

    def overall(self) -> Together:
        """Return how many have run so far, while any did."""
        self._advance()
        return Together(_mean(self._area, self._busy, self._most), self._most)

    def _advance(self) -> float:
        now = time.perf_counter()
        self._area += len(self._running) * (now - self._at)
        self._busy += bool(self._running) * (now - self._at)
        self._at = now
        return now


def _mean(area: float, seconds: float, most: int) -> float:
    return area / seconds if seconds > 0 else float(most)


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt, what renders its generation, and what is called with its text or with the error that has ended it.

    `label` names it for people; `opened` is its request, where that is not the generator's.
    """

    prompt: Prompt
    renderer: Renderer
    label: str
    done: Callable[[str], None]
    failed: Callable[[TriforceError], None]
    opened: ModelRequest | None = None


@dataclass(slots=True)
class _Running:
    """A sequence under way."""

    sequence: BatchPrompt
    run: TextRun


class BatchGenerator:
    """Generates for up to `parallel` prompts at a time. `ended` is called with the meter of each that has ended.

    Attributes:
        concurrency: how many run together.
    """

    def __init__(
        self, generator: TextGenerator, parallel: int, ended: Callable[[Meter], None] = lambda meter: None
    ) -> None:
        self._generator = generator
        self._parallel = parallel
        self._ended = ended
        self._running: dict[int, _Running] = {}
        self.concurrency = Concurrency()
        self._count = self._new_tokens = 0
        self._started = time.perf_counter()

    def run(self, sequences: Iterator[BatchPrompt | None]) -> None:
        """Generate for all sequences, taken one by one as there is room; None: none is ready until another has ended.

        On Ctrl-C, what the running ones have written so far is rendered, and KeyboardInterrupt raised again.
        """
        events = self._generator.engine.generate_batch(self._requests(sequences), self._parallel)
        with closing(events):
            try:
                for key, event in events:
                    self._observe(key, event)
            except KeyboardInterrupt:
                events.close()
                self._interrupt()
                raise

    def summary_line(self) -> str:
        """Return in one line how many sequences there were, and the tokens a second of all together."""
        seconds = time.perf_counter() - self._started
        written = f"{self._new_tokens:,} written in {duration(seconds)} ({rate(self._new_tokens / seconds)})"
        return f"{counted(self._count, 'sequence')}, up to {self.concurrency.overall().most} together: {written}"

    def _requests(self, sequences: Iterator[BatchPrompt | None]) -> Iterator[BatchRequest | None]:
        for sequence in sequences:
            yield None if sequence is None else self._begin(sequence)

    def _begin(self, sequence: BatchPrompt) -> BatchRequest:
        run = self._generator.begin(sequence.prompt, sequence.renderer, sequence.label, sequence.opened)
        self._running[self._count] = _Running(sequence, run)
        request = run.request(self._count)
        self.concurrency.enter(self._count)
        self._count += 1
        return request

    def _observe(self, key: int, event: Event | Failed) -> None:
        running = self._running[key]
        if isinstance(event, Failed):
            self._end(key)
            running.sequence.failed(event.error)
            return
        running.run.observe(event)
        if running.run.has_ended:
            running.sequence.done(self._generator.finish(running.run, self._end(key)))

    def _end(self, key: int) -> float:
        """Forget a sequence; return how many ran together with it, in the mean."""
        meter = self._running.pop(key).run.meter
        self._new_tokens += meter.new_tokens
        self._ended(meter)
        return self.concurrency.leave(key).mean

    def _interrupt(self) -> None:
        """Render what there is of the running sequences: of the first one always, of others if it has any tokens."""
        for number, (key, running) in enumerate(self._running.items()):
            run, renderer = running.run, running.sequence.renderer
            if number and not run.meter.new_tokens:
                continue
            run.flush()
            summary = self._generator.summary(run, self.concurrency.leave(key).mean)
            renderer.finish(summary) if number else renderer.interrupt(summary)
