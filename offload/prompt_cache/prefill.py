"""Prefill with a memory on disk: what is stored of a prompt is taken over, the rest is run, and saved as it is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from ..events import Prefilled, Restored
from ..parallel import ALONE, Group
from ..sequence import TokenSequence
from ..speculation.runner import Runner
from .chain import Prompt, Storage
from .fingerprint import LEAST, TOKENS, fingerprint, name_of_all
from .folder import PromptFolder
from .restore import Restoration
from .reusable import ReusablePrefix
from .writer import BlockWriter


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
        self._runner, self._reusable = runner, ReusablePrefix(runner)
        self._clock = clock

    def prefill(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        """As `Runner.prefill`. Closed early, or killed, it has saved what was run up to the last whole block.

        A prompt that is read layer by layer is there, and saved, only as a whole.
        """
        runner, reusable = self._runner, self._reusable
        runner.settle(sequence)
        reusable.look()
        try:
            if len(sequence) < max(self._cache.least, TOKENS + 1):
                reusable.expect(len(sequence))
                yield from runner.prefill(sequence)
            else:
                yield from self._prefill(sequence)
        finally:
            reusable.note()

    def _prefill(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        prompt = Prompt(self._cache.storage, self._fingerprint, sequence.tokens)
        writer = BlockWriter(prompt, self._runner)

        def compute(end: int) -> Generator[Prefilled]:
            return self._run(sequence, writer, end, end)

        try:
            yield from Restoration(prompt, self._runner, self._reusable, compute, self._clock).take_over(sequence)
            self._reusable.expect(len(sequence))
            yield from self._run(sequence, writer, len(sequence), self._reusable.length)
        finally:
            writer.close()

    def _run(self, sequence: TokenSequence, writer: BlockWriter, end: int, reusable: int) -> Generator[Prefilled]:
        """Run the sequence up to position `end`, and save what lies before position `reusable`."""
        runner, cached, before = self._runner, min(self._runner.num_cached, end - 1), self._clock()
        for event in runner.prefill(sequence, end):
            writer.save(reusable // TOKENS, runner.num_cached - cached, self._clock() - before)
            yield event
            cached, before = runner.num_cached, self._clock()
