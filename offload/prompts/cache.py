"""Prefill with a memory on disk: what is stored of a prompt is taken over, the rest is run, and saved as it is run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from ..context import Context
from ..errors import Degraded
from ..events import Prefilled, Restored
from ..parallel import ALONE, Group
from ..runner import Runner
from .folder import PromptFolder
from .fresh import Fresh
from .header import Header, UnusableBlock
from .identity import LEAST, TOKENS, fingerprint, name_of_all
from .prompt import Prompt
from .saving import Saver

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
        own = fingerprint(runner.model, runner.cache, runner.chunk, self.weights)
        names = self.group.collect(own)  # each rank's heads depend on what all of them have added up
        return SequencePrompts(self, own if len(names) == 1 else name_of_all(names), runner)

    @property
    def part(self) -> str:
        """Which heads these are, where there are others."""
        return f"{self.group.rank + 1}of{self.group.size}" if self.group.size > 1 else ""


class SequencePrompts:
    """The blocks that serve one runner's cache."""

    def __init__(
        self, cache: PromptCache, fingerprint: str, runner: Runner, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cache, self._folder = cache, cache.folder
        self._fingerprint = fingerprint
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
        prompt = Prompt(self._cache, self._fingerprint, context.tokens)
        yield from self._restore(context, prompt)
        self._fresh.expect(len(context))
        saver = Saver(prompt, self._runner, self._fresh.length // TOKENS)
        try:
            before = self._clock()
            for event in self._runner.prefill(context):
                saver.save(self._clock() - before)
                yield event
                before = self._clock()
        finally:
            saver.close()

    def _restore(self, context: Context, prompt: Prompt) -> Generator[Prefilled | Restored]:
        """Take over what is stored behind what the runner holds, as long as reading is quicker than computing."""
        runner, fresh, group = self._runner, self._fresh, self._cache.group
        stored = self._stored(context, prompt)
        held = min(runner.held, fresh.length) if stored else runner.held  # what is behind that is dropped
        size, race, begun = 0, Race(), self._clock()
        yield Prefilled(min(held, len(context) - 1), len(context))
        for index in stored:
            start = self._clock()
            block, trouble = _read(prompt, index)
            if not all(group.collect(block is not None)):
                _warn(group.collect(trouble))
                break
            keys, values, header = block
            runner.restore(index * TOKENS, prompt.ids(index), keys, values)
            size += keys.nbytes + values.nbytes
            yield Prefilled(runner.held, len(context))
            race.observe(*group.agree((self._clock() - start, header.prefill_s)))
            if race.lost:
                break
        if size:
            runner.truncate(runner.held // TOKENS // fresh.blocks * fresh.blocks * TOKENS)
            fresh.length = runner.held
            self._folder.hit(prompt.paths[max(runner.held // TOKENS - 1, 0)])
            yield Restored(runner.held - held, size * group.size, self._clock() - begun)

    def _stored(self, context: Context, prompt: Prompt) -> range:
        """The numbers of blocks that may be taken over, in the place of what is held and not as in a fresh run.

        The last token must be run, for its row.
        """
        first, unit = self._fresh.length // TOKENS, self._fresh.blocks
        reach = prompt.stored(first, (len(context) - 1) // TOKENS)
        last = min(self._cache.group.collect(reach // unit * unit))
        return range(first, last if last * TOKENS > self._runner.held else first)


def _read(prompt: Prompt, index: int) -> tuple[tuple[Tensor, Tensor, Header] | None, str]:
    """A block; None if it is no use, and why, or if another process has just made room."""
    try:
        return prompt.read(index), ""
    except FileNotFoundError:
        return None, ""
    except UnusableBlock as error:
        prompt.bad.add(prompt.paths[index])
        return None, f"{prompt.paths[index]}: {error}"


def _warn(troubles: Sequence[str]) -> None:
    """Of every rank's: only rank 0's warnings are seen."""
    for rank, trouble in enumerate(troubles):
        if trouble:
            where = f"rank {rank}: " if len(troubles) > 1 else ""
            warnings.warn(f"a file of the prompt cache is not used: {where}{trouble}", Degraded, stacklevel=2)


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
