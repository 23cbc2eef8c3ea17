"""Prefill with a prompt cache: restore the blocks of a prompt that are on disk, run the rest, and save its blocks."""

import time
from collections.abc import Generator

from ..events import Prefilled, Restored
from ..sequence import TokenSequence
from ..settings.kv_formats import saved_format
from ..speculation.passes.runner import Runner
from .fingerprint import TOKENS, Reusable, fingerprint, name_of_all
from .prompt import Prompt, PromptCache
from .restore import Restoration
from .writer import BlockWriter


class CachedPrefill:
    """The prefill of one runner, whose cache is dumpable, with the prompt cache of its model."""

    def __init__(self, cache: PromptCache, runner: Runner) -> None:
        self._cache, self._runner, self._reusable = cache, runner, Reusable(runner)
        own = fingerprint(runner.model, self._reusable.cache, runner.chunk, cache.weights)
        names = cache.group.collect(own)  # each rank's KV depends on the sums over all ranks
        self.fingerprint = own if len(names) == 1 else name_of_all(names)

    def prefill(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        """Do what `Runner.prefill` does. Closed early or killed, it has saved the whole blocks that were run.

        A prompt that is run layer by layer is saved only after its whole prefill.
        """
        runner, reusable = self._runner, self._reusable
        runner.settle(sequence)
        reusable.update()
        try:
            self._cache.saved = 0
            if len(sequence) < max(self._cache.least, TOKENS + 1):
                reusable.plan(len(sequence))
                yield from runner.prefill(sequence)
            else:
                yield from self._prefill(sequence)
        finally:
            reusable.mark()

    def _prefill(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        runner, reusable = self._runner, self._reusable
        prompt = Prompt(self._cache, self.fingerprint, sequence.tokens, saved_format(runner.model.kv))
        yield from Restoration(prompt, runner, reusable).restore(sequence)
        reusable.plan(len(sequence))
        cached, before = min(runner.num_cached, len(sequence) - 1), time.perf_counter()
        writer = BlockWriter(prompt, runner, reusable.cache, len(sequence) - cached)
        try:
            for event in runner.prefill(sequence):
                seconds = time.perf_counter() - before
                writer.save(reusable.length // TOKENS, max(runner.num_cached - cached, 0), seconds)
                yield event
                cached, before = runner.num_cached, time.perf_counter()
        finally:
            writer.close()
            self._cache.saved = writer.saved
