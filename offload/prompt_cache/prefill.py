"""Prefill with a prompt cache: restore the blocks of a prompt that are on disk, run the rest, and save its blocks."""

from __future__ import annotations

import time
from collections.abc import Generator
from copy import copy
from threading import Semaphore

from ..events import Prefilled, Restored
from ..parallel import ALONE, Group
from ..sequence import TokenSequence
from ..settings.kv_formats import saved_format
from ..speculation.passes.runner import Runner
from .fingerprint import LEAST, TOKENS, Reusable, fingerprint, name_of_all
from .folder import PromptFolder
from .prompt import Prompt, Storage
from .restore import Restoration
from .writer import MOST_COPIED, BlockWriter


class PromptCache:
    """The prompt cache of one model. `label` is the display name of the next prompt, and may be set at any time.

    Args:
        weights: the digest of the model's weights (`loading.weights_digest`).
        model: the model's display name.
        least: tokens; shorter prompts are neither saved nor restored.
        group: the ranks that share the model. Each saves its own heads, and all restore the same blocks.
    """

    def __init__(
        self, folder: PromptFolder, weights: str, model: str, least: int = LEAST, group: Group = ALONE
    ) -> None:
        self.folder, self.group = folder, group
        self.weights, self.model, self.least = weights, model, least
        self.label = ""
        self.places = Semaphore(MOST_COPIED)

    def bind(self, runner: Runner) -> SequencePrompts:
        """Return the prompt cache for the sequences of one runner, whose cache is dumpable."""
        own = fingerprint(runner.model, runner.cache, runner.chunk, self.weights)
        names = self.group.collect(own)  # each rank's KV depends on the sums over all ranks
        return SequencePrompts(self, own if len(names) == 1 else name_of_all(names), runner)

    def scoped(self, scope: str) -> PromptCache:
        """Return a cache in the same folder that shares no blocks with other scopes, the one without a name included.

        The scope is part of the fingerprint, so its blocks have a folder of their own, under a hash of it.
        """
        scoped = copy(self)
        scoped.weights = f"{self.weights} scope {scope}"
        return scoped


class SequencePrompts:
    """The prompt cache as one runner uses it."""

    def __init__(self, cache: PromptCache, fingerprint: str, runner: Runner) -> None:
        self._cache, self.fingerprint = cache, fingerprint
        self._runner, self._reusable = runner, Reusable(runner)

    def prefill(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        """Do what `Runner.prefill` does. Closed early or killed, it has saved the whole blocks that were run.

        A prompt that is run layer by layer is saved only after its whole prefill.
        """
        runner, reusable = self._runner, self._reusable
        runner.settle(sequence)
        reusable.update()
        try:
            if len(sequence) < max(self._cache.least, TOKENS + 1):
                reusable.plan(len(sequence))
                yield from runner.prefill(sequence)
            else:
                yield from self._prefill(sequence)
        finally:
            reusable.mark()

    def _prefill(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        cache, runner = self._cache, self._runner
        storage = Storage(cache.folder, cache.group, cache.model, cache.label, saved_format(runner.model.kv))
        prompt = Prompt(storage, self.fingerprint, sequence.tokens)
        yield from Restoration(prompt, runner, self._reusable).restore(sequence)
        self._reusable.plan(len(sequence))
        writer = BlockWriter(prompt, runner, cache.places)
        try:
            cached, before = min(runner.num_cached, len(sequence) - 1), time.perf_counter()
            for event in runner.prefill(sequence):
                writer.save(
                    self._reusable.length // TOKENS,
                    max(runner.num_cached - cached, 0),
                    time.perf_counter() - before,
                )
                yield event
                cached, before = runner.num_cached, time.perf_counter()
        finally:
            writer.close()
