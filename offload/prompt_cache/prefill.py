"""Prefill with a prompt cache: restore the blocks of a prompt that are on disk, run the rest, and save its blocks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Mapping
from copy import copy
from pathlib import Path
from threading import Semaphore

from ..errors import Degraded
from ..events import Prefilled, Restored
from ..loading.weights_digest import State, are_unchanged
from ..parallel import ALONE, Group
from ..sequence import TokenSequence
from ..settings.kv_formats import saved_format
from ..speculation.passes.runner import Runner
from .chain import Prompt, Storage
from .fingerprint import LEAST, TOKENS, fingerprint, name_of_all, reusable_prefix
from .folder import PromptFolder
from .restore import Restoration
from .writer import MOST_COPIED, BlockWriter


class PromptCache:
    """The prompt cache of one model. `label` is the display name of the next prompt, and may be set at any time.

    Args:
        weights: the digest of the model's weights (`fingerprint.weights_digest`).
        model: the model's display name.
        least: tokens; shorter prompts are neither saved nor restored.
        group: the ranks that share the model. Each saves its own heads, and all restore the same blocks.
        files: the weight files, as they were before the digest.
    """

    def __init__(
        self,
        folder: PromptFolder,
        weights: str,
        model: str,
        least: int = LEAST,
        group: Group = ALONE,
        files: Mapping[Path, State] | None = None,
    ) -> None:
        self.folder, self.group = folder, group
        self.weights, self.model, self.least = weights, model, least
        self.label, self._files = "", files or {}
        self.places = Semaphore(MOST_COPIED)

    def is_of_loaded(self) -> bool:
        """Return whether weights that have been loaded since are those of the digest, on every rank; warn if not."""
        unchanged = self.group.collect(are_unchanged(self._files))
        if not all(unchanged):
            warnings.warn("prompts are not cached: the model's files changed while they were read", Degraded, 2)
        return all(unchanged)

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

    def storage(self, kv: str) -> Storage:
        """Return where the next prompt is stored, with keys and values in format `kv`."""
        return Storage(self.folder, self.group, self.model, self.label, kv)


class SequencePrompts:
    """The prompt cache as one runner uses it."""

    def __init__(self, cache: PromptCache, fingerprint: str, runner: Runner) -> None:
        self._cache, self.fingerprint = cache, fingerprint
        self._runner, self._reusable = runner, reusable_prefix(runner)

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
        prompt = Prompt(self._cache.storage(saved_format(self._runner.model.kv)), self.fingerprint, sequence.tokens)
        writer = BlockWriter(prompt, self._runner, self._cache.places)

        def compute(end: int) -> Generator[Prefilled]:
            return self._run(sequence, writer, end, end)

        try:
            yield from Restoration(prompt, self._runner, self._reusable, compute).restore(sequence)
            self._reusable.plan(len(sequence))
            yield from self._run(sequence, writer, len(sequence), self._reusable.length)
        finally:
            writer.close()

    def _run(self, sequence: TokenSequence, writer: BlockWriter, end: int, reusable: int) -> Generator[Prefilled]:
        """Run the sequence up to position `end`, and save the blocks before position `reusable`."""
        runner, cached, before = self._runner, min(self._runner.num_cached, end - 1), time.perf_counter()
        for event in runner.prefill(sequence, end):
            writer.save(reusable // TOKENS, max(runner.num_cached - cached, 0), time.perf_counter() - before)
            yield event
            cached, before = runner.num_cached, time.perf_counter()
