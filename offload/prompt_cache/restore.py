"""Restore the stored blocks of one prompt; compute damaged and missing ones."""

import time
import warnings
from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from ..errors import Degraded
from ..events import Prefilled, Restored
from ..sequence import TokenSequence
from ..speculation.passes.runner import Runner
from .chain import BlockReader, Prompt, last_with_states, path_of, read_states
from .fingerprint import TOKENS, Reusable
from .folder import Header, UnusableBlock

TRIAL = 1.0  # seconds of reading before it is compared with computing

_VALID, _DAMAGED, _MISSING = "valid", "damaged", "missing"  # states of a block's file at one rank


class Restoration:
    """Restores one prompt's stored blocks into a runner's cache, in order, reading each file once.

    Only damaged and missing blocks are computed. The blocks after them are restored: they have the same bits as if
    they were computed.
    """

    def __init__(
        self, prompt: Prompt, runner: Runner, reusable: Reusable, compute: Callable[[int], Generator[Prefilled]]
    ) -> None:
        """`compute(end)` runs and saves the prompt's tokens before position `end` that are not in the cache."""
        self._prompt, self._runner, self._reusable = prompt, runner, reusable
        self._compute = compute
        self._race = Race()
        self._gap = range(0)  # blocks to compute: damaged and missing ones, and the others of their chunks
        self._errors: list[str] = []  # of this rank's files
        self._computed = self._size = 0  # tokens computed, bytes read
        self._seconds = 0.0  # of reading and restoring
        self._any_damage = False  # at any rank

    def restore(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        """Restore the stored blocks after the cached tokens, as long as reading is faster than computing."""
        runner = self._runner
        stored = self._stored(sequence)
        cached = runner.num_cached
        if stored:
            cached = min(
                cached, self._reusable.length, (stored.start + 1) * TOKENS - 1
            )  # what is after that is dropped
        yield Prefilled(min(cached, len(sequence) - 1), len(sequence))
        with BlockReader(self._prompt, stored) as reader:
            yield from self._restore_from(reader, stored, len(sequence))
        if self._size and runner.cache.states is not None:
            self._restore_states(stored.start)
        if self._any_damage:
            _warn(self._prompt.storage.group.collect(self._errors))
        if self._size:
            unit = self._reusable.blocks * TOKENS
            runner.truncate(runner.num_cached // unit * unit)
            self._reusable.length = runner.num_cached
            yield from self._report(cached)

    def _stored(self, sequence: TokenSequence) -> range:
        """Return the numbers of the stored blocks to restore, from the first that is not reusable in the cache.

        The prompt's last token is not among them: it must be run for its logits, as the tokens whose rows are kept.
        """
        first, unit, cache = self._reusable.length // TOKENS, self._reusable.blocks, self._runner.cache
        has_states = cache.states is not None
        if has_states and not cache.continues(first * TOKENS):
            first = 0
        fresh = 1 if self._runner.kept is None else self._runner.kept.window
        reach = self._prompt.stored(first, max(len(sequence) - fresh, 0) // TOKENS)
        if has_states:
            reach = last_with_states(self._prompt, first, reach, unit)
        last = min(self._prompt.storage.group.collect(reach // unit * unit))
        return range(first, last if last * TOKENS > self._runner.num_cached else first)

    def _restore_from(self, reader: BlockReader, stored: range, total: int) -> Generator[Prefilled]:
        group = self._prompt.storage.group
        for index in stored:
            start = time.perf_counter()
            state, block = self._read(index, reader)
            states = group.collect(state)
            self._seconds += (reading := time.perf_counter() - start)
            if set(states) != {_VALID}:
                self._any_damage = self._any_damage or _DAMAGED in states
                if self._runner.cache.states is not None:  # there are none from which to compute the block
                    return
                self._skip(index)
            elif index >= self._gap.stop:  # earlier ones are computed with the gap
                yield from self._fill_gap()
                self._restore_block(index, block, reading)
                if (index + 1) % self._reusable.blocks == 0:  # else a gap in the same chunk may still drop it
                    yield Prefilled(self._runner.num_cached, total, restored=True)
                if self._race.lost:
                    return

    def _read(self, index: int, reader: BlockReader) -> tuple[str, tuple[Tensor, Header] | None]:
        """Return the state of a block's file, and the block if it is valid."""
        try:
            return _VALID, reader.take()
        except FileNotFoundError:  # evicted, perhaps just now by another process
            return _MISSING, None
        except UnusableBlock as error:
            self._errors.append(f"{self._prompt.paths[index]}: {error}")
            return _DAMAGED, None

    def _skip(self, index: int) -> None:
        """Add a block to the gap, with the blocks that are computed in the same chunks."""
        unit = self._reusable.blocks
        first = self._gap.start if self._gap else index // unit * unit
        self._gap = range(first, (index // unit + 1) * unit)

    def _fill_gap(self) -> Generator[Prefilled]:
        """Compute the blocks of the gap."""
        gap, self._gap = self._gap, range(0)
        if gap:
            self._runner.truncate(gap.start * TOKENS)
            self._computed += len(gap) * TOKENS
            yield from self._compute(gap.stop * TOKENS)

    def _restore_block(self, index: int, block: tuple[Tensor, Header], reading: float) -> None:
        """Copy a block into the cache, after waiting `reading` seconds for it."""
        kv, header = block
        start = time.perf_counter()
        self._runner.restore(index * TOKENS, self._prompt.ids(index), kv)
        self._size += kv.nbytes
        self._seconds += (writing := time.perf_counter() - start)
        self._race.observe(*self._prompt.storage.group.agree((reading + writing, header.prefill_s)))

    def _restore_states(self, first: int) -> None:
        """Restore the last states that can be read, and drop the tokens behind them."""
        start, last = time.perf_counter(), self._runner.num_cached // TOKENS
        while (end := last_with_states(self._prompt, first, last, self._reusable.blocks)) > first:
            try:
                states = read_states(self._prompt, end - 1)
            except FileNotFoundError:
                last = end - 1
            except UnusableBlock as error:
                self._note_damaged_states(end - 1, error)
            else:
                self._runner.restore_states(end * TOKENS, states)
                self._size += states.nbytes
                break
        else:
            self._runner.truncate(first * TOKENS)
        self._seconds += time.perf_counter() - start

    def _note_damaged_states(self, index: int, error: UnusableBlock) -> None:
        """Remove a damaged file, so that it is saved again."""
        path = path_of(self._prompt, index)
        self._errors.append(f"{path}: {error}")
        self._any_damage = True
        self._prompt.folder.remove(path)

    def _report(self, cached: int) -> Generator[Restored]:
        """Yield how much was restored, and count a hit; `cached` tokens were in memory before.

        It is a hit if more than half of the prompt was restored: a question on a document that is in memory may find
        blocks of its own on disk, which is none.
        """
        prompt, runner = self._prompt, self._runner
        restored = runner.num_cached - cached - self._computed
        if restored <= 0:
            return
        if restored > cached:
            prompt.folder.hit(prompt.paths[runner.num_cached // TOKENS - 1])
        yield Restored(restored, self._size * prompt.storage.group.size, self._seconds)


def _warn(errors: Sequence[Sequence[str]]) -> None:
    """Warn once of the damaged files of all ranks (rank 0's warnings are shown)."""
    rank, first = next((rank, each[0]) for rank, each in enumerate(errors) if each)
    where = f"rank {rank}: " if len(errors) > 1 else ""
    count = sum(map(len, errors))
    several = f"{count:,} files of the prompt cache are not used, the first: "
    what = "a file of the prompt cache is not used: " if count == 1 else several
    warnings.warn(f"{what}{where}{first}", Degraded, stacklevel=2)


class Race:
    """Compares the seconds of reading blocks with the seconds that computing the same blocks took.

    The first block is not counted: its time is that of starting threads and taking memory, too.
    """

    def __init__(self) -> None:
        self._reading = self._computing = 0.0
        self._has_begun = False

    def observe(self, reading: float, computing: float) -> None:
        """Add the seconds of one block."""
        if self._has_begun:
            self._reading += reading
            self._computing += computing
        self._has_begun = True

    @property
    def lost(self) -> bool:
        """Return whether reading was slower than computing, once TRIAL seconds have been read."""
        return self._reading > max(self._computing, TRIAL)
