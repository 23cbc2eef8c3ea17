"""Restore the stored blocks of one prompt, up to the first that is missing or damaged."""

import time
import warnings
from collections.abc import Generator, Sequence

from torch import Tensor

from ..errors import Degraded
from ..events import Prefilled, Restored
from ..sequence import TokenSequence
from ..speculation.passes.runner import Runner
from .fingerprint import TOKENS, Reusable
from .folder import UnusableBlock
from .prompt import BlockReader, Prompt

_MISSING = "missing"


class Restoration:
    """Restores one prompt's stored blocks into a runner's cache, in order, reading each file once.

    What follows the first missing or damaged block at any rank is computed, and saved in their place.
    """

    def __init__(self, prompt: Prompt, runner: Runner, reusable: Reusable) -> None:
        self._prompt, self._runner, self._reusable = prompt, runner, reusable
        self._cache, self._group = reusable.cache, prompt.cache.group
        self._size = 0  # bytes restored
        self._seconds = 0.0  # of reading and restoring

    def restore(self, sequence: TokenSequence) -> Generator[Prefilled | Restored]:
        """Restore the stored blocks after the cached tokens."""
        runner = self._runner
        stored = self._stored(sequence)
        cached = runner.num_cached
        if stored:  # what follows these is dropped
            cached = min(cached, self._reusable.length, (stored.start + 1) * TOKENS - 1)
        yield Prefilled(min(cached, len(sequence) - 1), len(sequence))
        with BlockReader(self._prompt, stored) as reader:
            for index in stored:
                if not self._restore_block(index, reader):
                    break
                if (index + 1) % self._reusable.blocks == 0:
                    yield Prefilled(runner.num_cached, len(sequence), restored=True)
        if not self._size:
            return
        if self._cache.states is not None:
            self._restore_states(stored.start)
        unit = self._reusable.blocks * TOKENS
        runner.truncate(runner.num_cached // unit * unit)
        self._reusable.length = runner.num_cached
        if (restored := runner.num_cached - cached) > 0:
            yield Restored(restored, self._size * self._group.size, self._seconds)

    def _stored(self, sequence: TokenSequence) -> range:
        """Return the numbers of the stored blocks to restore, from the first that is not reusable in the cache.

        The prompt's last token is not among them: it must be run for its logits, as the tokens whose rows are kept.
        """
        first, unit = self._reusable.length // TOKENS, self._reusable.blocks
        if self._cache.states is not None and not self._cache.continues(first * TOKENS):
            first = 0
        fresh = 1 if self._runner.kept is None else self._runner.kept.window
        end = self._prompt.stored(first, max(len(sequence) - fresh, 0) // TOKENS)
        if self._cache.states is not None:
            end = self._prompt.last_with_states(first, end, unit)
        last = min(self._group.collect(end // unit * unit))
        return range(first, last if last * TOKENS > self._runner.num_cached else first)

    def _restore_block(self, index: int, reader: BlockReader) -> bool:
        """Copy the reader's next block into the cache; return whether all ranks have it."""
        started = time.perf_counter()
        problem, kv = self._read(index, reader)
        problems = self._group.collect(problem)
        if kv is None or any(problems):
            _warn([problem for problem in problems if problem not in ("", _MISSING)])
            return False
        self._runner.restore(index * TOKENS, self._prompt.ids(index), kv)
        self._size += kv.nbytes
        self._seconds += time.perf_counter() - started
        return True

    def _read(self, index: int, reader: BlockReader) -> tuple[str, Tensor | None]:
        """Return the fault of a block's file, and the block's KV where it has none. A damaged file is removed."""
        try:
            return "", reader.take()
        except FileNotFoundError:  # evicted by another process just now
            return _MISSING, None
        except UnusableBlock as error:
            self._prompt.folder.remove(self._prompt.paths[index])
            return f"{self._prompt.paths[index]}: {error}", None

    def _restore_states(self, first: int) -> None:
        """Restore the last states that can be read, and drop the tokens behind them."""
        started, last, prompt = time.perf_counter(), self._runner.num_cached // TOKENS, self._prompt
        while (end := prompt.last_with_states(first, last, self._reusable.blocks)) > first:
            try:
                states = prompt.read_states(end - 1)
            except FileNotFoundError:
                last = end - 1
            except UnusableBlock as error:
                path = prompt.states_path(end - 1)
                prompt.folder.remove(path)
                _warn([f"{path}: {error}"])
            else:
                self._runner.restore_states(end * TOKENS, states)
                self._size += states.nbytes
                break
        else:
            self._runner.truncate(first * TOKENS)
        self._seconds += time.perf_counter() - started


def _warn(problems: Sequence[str]) -> None:
    """Warn of a damaged file, of the first rank that has one."""
    if problems:
        warnings.warn(f"a file of the prompt cache is damaged, and computed again: {problems[0]}", Degraded, 2)
