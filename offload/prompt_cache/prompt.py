"""A prompt as a chain of blocks: the file of each block, the states saved with some, and a reader that reads ahead.

States of layers with linear attention take as much as the keys and values of many tokens, so they are saved with every
sixteenth block and with the last one of a prompt, in a file of their own. A prompt is restored up to one with states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..parallel import Group
from .block import Buffer, read_block
from .fingerprint import TOKENS, chain
from .folder import Header, PromptFolder

STATES = "states"  # the part of their files, in names and headers
EVERY = 16  # blocks with states, beside the last one that is saved
_THREADS = 2  # reading and hashing release the GIL
_AHEAD = 4  # blocks in memory: the one that is used, and those that are read before they are needed


@dataclass(frozen=True, slots=True)
class Storage:
    """The folder of a model's prompts, and what the headers of their blocks say.

    `model` and `label` are display names; `kv` is the format of keys and values.
    """

    folder: PromptFolder
    group: Group
    model: str
    label: str
    kv: str

    @property
    def part(self) -> str:
        """Return the name of this rank's share of the heads, "" for a single rank."""
        return f"{self.group.rank + 1}of{self.group.size}" if self.group.size > 1 else ""


class Prompt:
    """The whole blocks of a prompt, with their `keys` and `paths` in order."""

    def __init__(self, storage: Storage, fingerprint: str, ids: Sequence[int]) -> None:
        self.storage, self.fingerprint, self.folder = storage, fingerprint, storage.folder
        self._ids = list(ids)
        self.keys = list(chain(fingerprint, self._ids))
        self.paths = [self.folder.block(fingerprint, *each, storage.part) for each in enumerate(self.keys)]

    def ids(self, index: int) -> list[int]:
        """Return a block's tokens."""
        return self._ids[index * TOKENS : (index + 1) * TOKENS]

    def read(self, index: int, buffer: Buffer | None = None) -> tuple[Tensor, Header]:
        """Return a block's KV, in the buffer, and its header. Raises FileNotFoundError, UnusableBlock."""
        return read_block(self.paths[index], self.keys[index], self.storage.part, buffer)

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
        self._pending: deque[Future[tuple[Tensor, Header]]] = deque()
        self._executor = ThreadPoolExecutor(_THREADS, "triforce-prompt-reader")

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def take(self) -> tuple[Tensor, Header]:
        """Return the KV and header of the next block, valid until the next call. Raises as `Prompt.read`."""
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
