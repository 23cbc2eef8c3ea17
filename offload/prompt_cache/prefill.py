"""Prefill with a memory on disk: what is stored of a prompt is taken over, the rest is run, and saved as it is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from ..events import Prefilled, Restored
from ..parallel import ALONE, Group
from ..sequence import Context
from ..speculation.runner import Runner
from .chain import Prompt, Storage
from .fingerprint import LEAST, TOKENS, fingerprint, name_of_all
from .folder import PromptFolder
from .restore import Restoration
from .reusable import Fresh
from .writer import Saver


class PromptCache:
    """What is kept of the prompts of one model.

    Args:
        weights: the digest of the model's weights (`identity.weights_digest`).
        model: its name, for people; `label`, which may be set at any time, is the next prompt's.
        least: prompts with fewer tokens are not kept.
        group: the ranks that share the model. Each keeps its own heads, and all take over the same blocks.
    """

    def __init__(
        self, folder: PromptFolder, weights: str, model: str, least: int = LEAST, group: Group = ALONE
    ) -> None:
        self.folder, self.group = folder, group
        self.weights, self.model, self.least = weights, model, least
        self.label = ""

    def bind(self, runner: Runner) -> SequencePrompts:
        """For the sequences that a runner on a FullCache reads."""
        own = fingerprint(runner.model, runner.cache, runner.chunk, self.weights)
        names = self.group.collect(own)  # each rank's heads depend on what all of them have added up
        return SequencePrompts(self, own if len(names) == 1 else name_of_all(names), runner)

    @property
    def storage(self) -> Storage:
        """Return where the next prompt is kept."""
        return Storage(self.folder, self.group, self.model, self.label)


class SequencePrompts:
    """The blocks that serve one runner's cache."""

    def __init__(
        self, cache: PromptCache, fingerprint: str, runner: Runner, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cache, self._fingerprint = cache, fingerprint
        self._runner, self._fresh = runner, Fresh(runner)
        self._clock = clock

    def prefill(self, context: Context) -> Generator[Prefilled | Restored]:
        """As `Runner.prefill`. Closed early, or killed, it has saved what was run up to the last whole block.

        A prompt that is read layer by layer is there, and saved, only as a whole.
        """
        runner, fresh = self._runner, self._fresh
        runner.settle(context)
        fresh.look()
        try:
            if len(context) < max(self._cache.least, TOKENS + 1):
                fresh.expect(len(context))
                yield from runner.prefill(context)
            else:
                yield from self._prefill(context)
        finally:
            fresh.note()

    def _prefill(self, context: Context) -> Generator[Prefilled | Restored]:
        prompt = Prompt(self._cache.storage, self._fingerprint, context.tokens)
        saver = Saver(prompt, self._runner)

        def compute(end: int) -> Generator[Prefilled]:
            return self._run(context, saver, end, end)

        try:
            yield from Restoration(prompt, self._runner, self._fresh, compute, self._clock).take_over(context)
            self._fresh.expect(len(context))
            yield from self._run(context, saver, len(context), self._fresh.length)
        finally:
            saver.close()

    def _run(self, context: Context, saver: Saver, end: int, fresh: int) -> Generator[Prefilled]:
        """Run the context up to place `end`; what of it lies before place `fresh` is saved."""
        runner, held, before = self._runner, min(self._runner.held, end - 1), self._clock()
        for event in runner.prefill(context, end):
            saver.save(fresh // TOKENS, runner.held - held, self._clock() - before)
            yield event
            held, before = runner.held, self._clock()
