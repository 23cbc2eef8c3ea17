"""Prefill with a memory on disk: what is stored of a prompt is taken over, the rest is run, and saved as it is run."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator

from torch import Tensor

from ..context import Context
from ..errors import Degraded
from ..events import Prefilled, Restored
from ..parallel import ALONE, Group
from ..runner import Runner
from .folder import PromptFolder
from .header import Header, UnusableBlock
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
        name = fingerprint(runner.model, runner.cache, runner.chunk, self.weights)
        return SequencePrompts(self, self.group.told(name))

    @property
    def part(self) -> str:
        """Which heads these are, where there are others."""
        return f"{self.group.rank + 1}of{self.group.size}" if self.group.size > 1 else ""


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
        yield from self._restore(runner, context, prompt)
        saver = Saver(prompt, runner)
        try:
            before = self._clock()
            for event in runner.prefill(context, STRIDE):
                saver.save(self._clock() - before)
                yield event
                before = self._clock()
        finally:
            saver.close()

    def _restore(self, runner: Runner, context: Context, prompt: Prompt) -> Generator[Prefilled | Restored]:
        """Take over what is stored behind what the runner holds, as long as reading is quicker than computing."""
        runner.settle(context)
        held, size, group = runner.held, 0, self._cache.group
        race, begun = Race(), self._clock()
        yield Prefilled(held, len(context))
        for index in range(held // TOKENS, min(group.collect(_reach(runner, context, prompt)))):
            start = self._clock()
            block = _read(prompt, index)
            if not all(group.collect(block is not None)):
                break
            keys, values, header = block
            runner.restore(index * TOKENS, prompt.ids(index), keys, values)
            size += keys.nbytes + values.nbytes
            yield Prefilled(runner.held, len(context))
            race.observe(*group.agree((self._clock() - start, header.prefill_s)))
            if race.lost:
                break
        if size:
            self._folder.hit(prompt.paths[runner.held // TOKENS - 1])
            yield Restored(runner.held - held, size, self._clock() - begun)


def _read(prompt: Prompt, index: int) -> tuple[Tensor, Tensor, Header] | None:
    """A block; None, with a warning, if it is no use, or if another process has just made room."""
    try:
        return prompt.read(index)
    except FileNotFoundError:
        return None
    except UnusableBlock as error:
        prompt.bad.add(prompt.paths[index])
        warnings.warn(f"a file of the prompt cache is not used: {prompt.paths[index]}: {error}", Degraded, stacklevel=2)
        return None


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
