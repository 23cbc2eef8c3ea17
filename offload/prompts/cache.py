"""Prefill with a memory on disk: what is stored of a prompt is taken over, the rest is run, and saved as it is run."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path

from ..context import Context
from ..errors import Degraded
from ..events import Prefilled, Restored
from ..runner import Runner
from .folder import PromptFolder
from .header import UnusableBlock
from .identity import LEAST, TOKENS, fingerprint
from .prompt import Prompt
from .saving import Saver

STRIDE = 128 * TOKENS  # tokens between two chances to save, where a prompt is read layer by layer
TRIAL = 1.0  # seconds of reading before it is judged


class PromptCache:
    """What is kept of the prompts of one model.

    Args:
        weights: the digest of the model's weights (`identity.weights_digest`).
        model: its name, for people; `label`, which may be set at any time, is the next prompt's.
        least: prompts with fewer tokens are not kept.
        part: which heads these are, where several processes share a model.
    """

    def __init__(self, folder: PromptFolder, weights: str, model: str, least: int = LEAST, part: str = "") -> None:
        self.folder = folder
        self.weights, self.model, self.least, self.part = weights, model, least, part
        self.label = ""

    def bind(self, runner: Runner) -> SequencePrompts:
        """For the sequences that a runner on a FullCache reads."""
        return SequencePrompts(self, fingerprint(runner.model, runner.cache, runner.chunk, self.weights))


class SequencePrompts:
    """The blocks that serve one runner's cache."""

    def __init__(self, cache: PromptCache, fingerprint: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cache, self._folder = cache, cache.folder
        self._fingerprint = fingerprint
        self._clock = clock

    def prefill(self, runner: Runner, context: Context) -> Generator[Prefilled | Restored]:
        """As `Runner.prefill`. Closed early, or killed, it has saved what was run up to the last whole block."""
        if len(context) < max(self._cache.least, TOKENS + 1):
            yield from runner.prefill(context)
            return
        prompt = Prompt(self._cache, self._fingerprint, context.tokens)
        bad = yield from self._restore(runner, context, prompt)
        saver = Saver(prompt, runner, bad)
        try:
            before = self._clock()
            for event in runner.prefill(context, STRIDE):
                saver.save(self._clock() - before)
                yield event
                before = self._clock()
        finally:
            saver.close()

    def _restore(
        self, runner: Runner, context: Context, prompt: Prompt
    ) -> Generator[Prefilled | Restored, None, Path | None]:
        """Take over what is stored behind what the runner holds, as long as reading is quicker than computing.

        Returns the path of a block that was no use.
        """
        runner.settle(context)
        held, size, bad = runner.held, 0, None
        race, begun = Race(), self._clock()
        yield Prefilled(held, len(context))
        for index in range(held // TOKENS, _reach(runner, context, prompt)):
            start = self._clock()
            try:
                keys, values, header = prompt.read(index)
            except FileNotFoundError:  # another process has made room
                break
            except UnusableBlock as error:
                bad = prompt.paths[index]
                warnings.warn(f"a file of the prompt cache is not used: {bad}: {error}", Degraded, stacklevel=2)
                break
            runner.restore(index * TOKENS, prompt.ids(index), keys, values)
            size += keys.nbytes + values.nbytes
            yield Prefilled(runner.held, len(context))
            race.observe(self._clock() - start, header.prefill_s)
            if race.lost:
                break
        if size:
            self._folder.hit(prompt.paths[runner.held // TOKENS - 1])
            yield Restored(runner.held - held, size, self._clock() - begun)
        return bad


def _reach(runner: Runner, context: Context, prompt: Prompt) -> int:
    """How many leading blocks are stored and may be taken over: the last token must be run, for its row.

    Where how a prompt is cut into chunks changes the rounding, the rest begins where a chunk would.
    """
    reach = prompt.stored(runner.held // TOKENS, (len(context) - 1) // TOKENS)
    grain = 1 if runner.model.operations.kernel is not None else math.lcm(runner.chunk, TOKENS) // TOKENS
    return reach // grain * grain


class Race:
    """Whether reading is still quicker than computing was, by what both took for the same blocks."""

    def __init__(self) -> None:
        self._reading = self._computing = 0.0

    def observe(self, reading: float, computing: float) -> None:
        """Seconds for one block."""
        self._reading += reading
        self._computing += computing

    @property
    def lost(self) -> bool:
        return self._reading > max(self._computing, TRIAL)
