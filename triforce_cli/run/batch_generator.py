"""Texts for several prompts together, over one loaded model, and how many of them ran at a time."""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.batching.request import BatchRequest
from offload.errors import TriforceError
from offload.metrics import Meter
from offload.units import counted

from ..output.format import duration, rate
from ..output.renderers import Renderer
from .generation import Generation
from .opened_request import OpenedRequest, Prompt
from .run import Run


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
    opened: OpenedRequest | None = None


class BatchGenerator:
    """Generates for up to `parallel` prompts at a time. `ended` is called with the meter of each that has ended.

    Attributes:
        most: sequences that have run together.
    """

    def __init__(self, run: Run, parallel: int, ended: Callable[[Meter], None]) -> None:
        self._run, self._parallel, self._ended = run, parallel, ended
        self._running: dict[Hashable, tuple[BatchPrompt, Generation]] = {}
        self._count = self._new_tokens = self.most = 0
        self._started = time.perf_counter()

    def run(self, prompts: Iterator[BatchPrompt | None]) -> None:
        """Generate for all prompts, taken one by one as there is room; None: none is ready until another has ended.

        On Ctrl-C, what the running ones have written so far is rendered, and KeyboardInterrupt raised again.
        """
        requests = (None if prompt is None else self._begin(prompt) for prompt in prompts)
        with closing(self._run.engine.generate_batch(requests, self._parallel)) as events:
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
        return f"{counted(self._count, 'sequence')}, up to {self.most} together: {written}"

    def _begin(self, prompt: BatchPrompt) -> BatchRequest:
        generation = self._run.begin(prompt.prompt, prompt.renderer, prompt.label, prompt.opened)
        request = generation.batch_request(self._count)
        self._running[self._count] = prompt, generation  # last: Ctrl-C ends those that it has
        self.most = max(self.most, len(self._running))
        self._count += 1
        return request

    def _observe(self, key: Hashable, event: BatchEvent) -> None:
        assert not isinstance(event, Cancelled), "these requests have no one who cancels them"
        prompt, generation = self._running[key]
        if isinstance(event, Failed):
            self._end(key)
            prompt.failed(event.error)
            return
        generation.observe(event)
        if generation.has_ended:
            prompt.done(self._run.finish(generation, self._end(key)))

    def _end(self, key: Hashable) -> int:
        """Forget a sequence; return how many ran at its end, itself included."""
        running = len(self._running)
        meter = self._running.pop(key)[1].meter
        self._new_tokens += meter.new_tokens
        self._ended(meter)
        return running

    def _interrupt(self) -> None:
        """Render what there is of the running sequences: of the first one always, of others if it has any tokens."""
        for number, (prompt, generation) in enumerate(self._running.values()):
            if number and not generation.meter.new_tokens:
                continue
            generation.flush()
            summary = self._run.summary(generation, len(self._running))
            if number:
                prompt.renderer.finish(summary)
            else:
                prompt.renderer.interrupt(summary)
