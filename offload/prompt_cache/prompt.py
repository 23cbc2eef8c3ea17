"""The prompt cache of a model, and one prompt in it: a chain of blocks in files, and a reader that reads them ahead.

States of layers with linear attention take as much as the keys and values of many tokens, so they are saved with every
sixteenth block and with the last one of a prompt, in a file of their own. A prompt is restored up to one with states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

from torch import Tensor

from ..parallel import ALONE, Group
from .block import Buffer, read_block
from .fingerprint import LEAST, TOKENS, chain
from .folder import Header, PromptFolder

STATES = "states"  # the part of their files, in names and headers
EVERY = 16  # blocks with states, beside the last one that is saved
MOST_COPIED = 2  # blocks copied for the threads and not written yet, of all writers of a cache together
_THREADS = 2  # reading and hashing release the GIL
_AHEAD = 4  # blocks in memory: the one that is used, and those that are read before they are needed


class PromptCache:
    """The prompt cache of one model.

    Attributes:
        folder: where the blocks of prompts are.
        weights: the digest of the model's weights (`loading.weights_digest`).
        model, label: the display names of the model, and of the next prompt; the label may be set at any time.
        least: tokens; shorter prompts are neither saved nor restored. 0 saves all; else none is that is read quickly.
        saved: tokens of the last prompt that were read, and are in the cache since.
        group: the ranks that share the model. Each saves its own heads, and all restore the same blocks.
        places: one for each block that may be copied at a time, shared by all writers.
    """

    def __init__(
        self, folder: PromptFolder, weights: str, model: str, least: int = LEAST, group: Group = ALONE
    ) -> None:
        self.folder, self.weights, self.model = folder, weights, model
        self.least, self.group = least, group
        self.label, self.saved = "", 0
        self.places = Semaphore(MOST_COPIED)

    @property
    def part(self) -> str:
        """Return the name of this rank's share of the heads, "" for a single rank."""
        return f"{self.group.rank + 1}of{self.group.size}" if self.group.size > 1 else ""


class Prompt:
    """The whole blocks of a prompt, with their `keys` and `paths` in order; `kv` is their format."""

    def __init__(self, cache: PromptCache, fingerprint: str, ids: Sequence[int], kv: str) -> None:
        self.cache, self.folder, self.label, self.kv = cache, cache.folder, cache.label, kv
        self.fingerprint = fingerprint
        self._ids = list(ids)
        self.keys = list(chain(fingerprint, self._ids))
        self.paths = [self.folder.block(fingerprint, index, key, cache.part) for index, key in enumerate(self.keys)]

    def ids(self, index: int) -> list[int]:
        """Return a block's tokens."""
        return self._ids[index * TOKENS : (index + 1) * TOKENS]

    def header(self, index: int, now: float, part: str | None = None) -> Header:
        """Return the header of a block; `part`: of its states."""
        parent = self.keys[index - 1] if index else ""
        names = self.cache.part if part is None else part, self.cache.model, self.label
        return Header(self.keys[index], parent, *names, now, self.kv)

    def read(self, index: int, buffer: Buffer | None = None) -> Tensor:
        """Return a block's KV, in the buffer. Raises FileNotFoundError, UnusableBlock."""
        return read_block(self.paths[index], self.keys[index], self.cache.part, buffer)[0]

    def stored(self, first: int, last: int) -> int:
        """Return the end of the existing blocks from `first` on and before `last` that have none missing between."""
        missing = (index for index in range(first, last) if not self.paths[index].exists())
        return next(missing, max(first, last))

    def states_path(self, index: int) -> Path:
        """Return the file of the states behind a block."""
        return self.folder.block(self.fingerprint, index, self.keys[index], STATES)

    def last_with_states(self, first: int, last: int, unit: int) -> int:
        """Return the end of the last block from `first` on and before `last` that has states; `first` if none has.

        Only multiples of `unit` blocks count.
        """
        ends = range(last // unit * unit, first, -unit)
        return next((end for end in ends if self.states_path(end - 1).exists()), first)

    def read_states(self, index: int) -> Tensor:
        """Return the states behind a block, as `States.dump` did. Raises FileNotFoundError, UnusableBlock."""
        return read_block(self.states_path(index), self.keys[index], STATES)[0]


class BlockReader:
    """Reads blocks of a prompt ahead, in order; a context manager that waits for its threads."""

    def __init__(self, prompt: Prompt, blocks: range) -> None:
        self._prompt = prompt
        self._next: Iterator[int] = iter(blocks)
        self._buffers = [Buffer() for _ in range(_AHEAD)]
        self._pending: deque[Future[Tensor]] = deque()
        self._executor = ThreadPoolExecutor(_THREADS, "triforce-prompt-reader")

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def take(self) -> Tensor:
        """Return the KV of the next block, valid until the next call. Raises as `Prompt.read`."""
        while len(self._pending) < _AHEAD - 1 and self._submit():
            pass
        block = self._pending.popleft()
        self._submit()  # into the buffer of the block before this one
        return block.result()

    def _submit(self) -> bool:
        index = next(self._next, None)
        if index is not None:
            buffer = self._buffers[index % _AHEAD]
            self._pending.append(self._executor.submit(self._prompt.read, index, buffer))
        return index is not None
