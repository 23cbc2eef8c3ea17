"""Generation for several prompts together, over one loaded model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from offload.batching.batch import Failed
from offload.batching.request import BatchRequest
from offload.errors import TriforceError
from offload.events import Event
from offload.units import counted

from ..output.batch_display import BatchDisplay
from ..output.format import duration, rate
from ..output.renderers import StreamRenderer
from .concurrency import Concurrency
from .generate import TextGenerator
from .model_request import Prompt
from .text_run import TextRun


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt, what renders its generation, and what is called with its text or with the error that has ended it.

    `label` names it for people.
    """

    prompt: Prompt
    renderer: StreamRenderer
    label: str
    done: Callable[[str], None]
    failed: Callable[[TriforceError], None]


@dataclass(slots=True)
class _Running:
    """A sequence under way."""

    sequence: BatchPrompt
    run: TextRun


class BatchGenerator:
    """Generates for up to `parallel` prompts at a time. Their progress is shown by `display`."""

    def __init__(self, generator: TextGenerator, parallel: int, display: BatchDisplay) -> None:
        self._generator = generator
        self._parallel = parallel
        self._display = display
        self._running: dict[int, _Running] = {}
        self._concurrency = Concurrency()
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
        return f"{counted(self._count, 'sequence')}, up to {self._concurrency.overall().most} together: {written}"

    def _requests(self, sequences: Iterator[BatchPrompt | None]) -> Iterator[BatchRequest | None]:
        for sequence in sequences:
            yield None if sequence is None else self._begin(sequence)

    def _begin(self, sequence: BatchPrompt) -> BatchRequest:
        run = self._generator.begin(sequence.prompt, sequence.renderer, sequence.label)
        self._running[self._count] = _Running(sequence, run)
        request = self._generator.request(self._count, run)
        self._concurrency.enter(self._count)
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
        self._display.end(meter)
        return self._concurrency.leave(key).mean

    def _interrupt(self) -> None:
        """Render what there is of the running sequences: of the first one always, of others if it has any tokens."""
        for number, (key, running) in enumerate(self._running.items()):
            run, renderer = running.run, running.sequence.renderer
            if number and not run.meter.new_tokens:
                continue
            run.flush()
            summary = self._generator.summary(run, self._concurrency.leave(key).mean)
            renderer.finish(summary) if number else renderer.interrupt(summary)
