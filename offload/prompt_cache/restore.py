"""Takes over the stored blocks of one prompt; what is damaged between them is computed again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from ..errors import Degraded
from ..events import Prefilled, Restored
from ..sequence import TokenSequence
from ..speculation.runner import Runner
from .chain import Prompt
from .fingerprint import TOKENS
from .header import Header, UnusableBlock
from .reusable import ReusablePrefix

TRIAL = 1.0  # seconds of reading before it is judged

_SOUND, _DAMAGED, _GONE = "sound", "damaged", "gone"  # what a rank finds in the place of a block


class Restoration:
    """Brings one prompt's stored blocks into a runner's cache, in order, each file read once.

    A damaged block costs its own computing and no more: what lies behind it was saved with the same bits as computing
    it gives, so it is taken over as soon as the runner has arrived there.
    """

    def __init__(
        self,
        prompt: Prompt,
        runner: Runner,
        reusable: ReusablePrefix,
        compute: Callable[[int], Generator[Prefilled]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`compute(end)` runs and saves the prompt's tokens before position `end` that are not in the cache."""
        self._prompt, self._runner, self._reusable = prompt, runner, reusable
        self._compute, self._clock = compute, clock
        self._race = Race()
        self._gap = range(0)  # damaged blocks, and what has to be computed with them
        self._troubles: list[str] = []  # what is wrong with this rank's files
        self._computed = self._size = 0  # tokens, and bytes that were read
        self._seconds = 0.0  # that reading took
        self._seen_damage = False  # at any rank

    def take_over(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        """Take over what is stored behind what the runner holds, as long as reading is quicker than computing."""
        runner = self._runner
        stored = self._stored(sequence)
        cached = runner.num_cached
        if stored:
            cached = min(cached, self._reusable.length)  # what is behind that is dropped
        yield Prefilled(min(cached, len(sequence) - 1), len(sequence))
        yield from self._read_all(stored, len(sequence))
        if self._seen_damage:
            _warn(self._prompt.storage.group.collect(self._troubles))
        if self._size:
            unit = self._reusable.blocks * TOKENS
            runner.truncate(runner.num_cached // unit * unit)
            self._reusable.length = runner.num_cached
            yield from self._report(cached)

    def _stored(self, sequence: TokenSequence) -> range:
        """The numbers of blocks that may be taken over, in the place of what is held and not as in a fresh run.

        The last token must be run, for its row.
        """
        first, unit = self._reusable.length // TOKENS, self._reusable.blocks
        reach = self._prompt.stored(first, (len(sequence) - 1) // TOKENS)
        last = min(self._prompt.storage.group.collect(reach // unit * unit))
        return range(first, last if last * TOKENS > self._runner.num_cached else first)

    def _read_all(self, stored: range, total: int) -> Generator[Prefilled]:
        group = self._prompt.storage.group
        for index in stored:
            start = self._clock()
            state, block = self._read(index)
            states = group.collect(state)
            self._seconds += (reading := self._clock() - start)
            if _GONE in states:
                return
            if _DAMAGED in states:
                self._skip(index)
            elif index >= self._gap.stop:  # what lies before that is computed with the damaged ones
                yield from self._fill_gap()
                self._restore(index, block, reading)
                if (index + 1) % self._reusable.blocks == 0:  # else it may have to go with a damaged one
                    yield Prefilled(self._runner.num_cached, total)
                if self._race.lost:
                    return

    def _read(self, index: int) -> tuple[str, tuple[Tensor, Tensor, Header] | None]:
        """What there is in the place of a block, and the block if it is sound."""
        try:
            return _SOUND, self._prompt.read(index)
        except FileNotFoundError:  # another process has just made room
            return _GONE, None
        except UnusableBlock as error:
            self._troubles.append(f"{self._prompt.paths[index]}: {error}")
            return _DAMAGED, None

    def _skip(self, index: int) -> None:
        """Have a damaged block computed: with it, what was cut to chunks together with it."""
        unit = self._reusable.blocks
        first = self._gap.start if self._gap else index // unit * unit
        self._gap = range(first, (index // unit + 1) * unit)
        self._seen_damage = True

    def _fill_gap(self) -> Generator[Prefilled]:
        gap, self._gap = self._gap, range(0)
        if gap:
            self._runner.truncate(gap.start * TOKENS)
            self._computed += len(gap) * TOKENS
            yield from self._compute(gap.stop * TOKENS)

    def _restore(self, index: int, block: tuple[Tensor, Tensor, Header], reading: float) -> None:
        """`reading`: seconds that it took so far."""
        keys, values, header = block
        start = self._clock()
        self._runner.restore(index * TOKENS, self._prompt.ids(index), keys, values)
        self._size += keys.nbytes + values.nbytes
        self._seconds += (writing := self._clock() - start)
        self._race.observe(*self._prompt.storage.group.agree((reading + writing, header.prefill_s)))

    def _report(self, cached: int) -> Generator[Restored]:
        """Yield what was read, and count a hit; `cached` tokens were in memory before.

        Questions on a document that is in memory may find their own words on disk, which is no hit. As with entries,
        prompts count as the same if more than half of one was found.
        """
        prompt, runner = self._prompt, self._runner
        taken = runner.num_cached - cached - self._computed
        if taken <= 0:
            return
        if taken > cached:
            prompt.folder.hit(prompt.paths[runner.num_cached // TOKENS - 1])
        yield Restored(taken, self._size * prompt.storage.group.size, self._seconds)


def _warn(troubles: Sequence[Sequence[str]]) -> None:
    """Warn once of every rank's damaged files: only rank 0's warnings are seen."""
    rank, first = next((rank, each[0]) for rank, each in enumerate(troubles) if each)
    where = f"rank {rank}: " if len(troubles) > 1 else ""
    count = sum(map(len, troubles))
    several = f"{count:,} files of the prompt cache are not used, the first: "
    what = "a file of the prompt cache is not used: " if count == 1 else several
    warnings.warn(f"{what}{where}{first}", Degraded, stacklevel=2)


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
