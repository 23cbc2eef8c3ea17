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
from .folder import Header, PromptFolder, UnusableBlock


@dataclass(frozen=True, slots=True)
class Storage:
    """The folder of a model's prompts, and what the headers of their blocks say.

    `model` and `label` are display names; `kv` is the format of keys and values. `part` names the heads of this rank
    where a group of ranks shards them.
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
        self.storage, self.fingerprint = storage, fingerprint
        self._ids = list(ids)
        self._valid: set[int] = set()  # blocks that were read and verified
        self._damaged: set[int] = set()  # blocks whose files have to be replaced
        self.keys = list(chain(fingerprint, self._ids))
        self.paths = [self.folder.block(fingerprint, *each, storage.part) for each in enumerate(self.keys)]

    @property
    def folder(self) -> PromptFolder:
        """Return the folder of the prompt's blocks."""
        return self.storage.folder

    def ids(self, index: int) -> list[int]:
        """Return a block's tokens."""
        return self._ids[index * TOKENS : (index + 1) * TOKENS]

    def read(self, index: int, buffer: Buffer | None = None) -> tuple[Tensor, Header]:
        """Return a block's KV, in the buffer, and its header. Raises FileNotFoundError, UnusableBlock."""
        try:
            block = read_block(self.paths[index], self.keys[index], self.ids(index), self.storage.part, buffer)
        except UnusableBlock:
            self._damaged.add(index)
            raise
        self._valid.add(index)
        return block

    def is_saved(self, index: int) -> bool:
        """Return whether a block's file exists, so that it need not be written.

        Once one file was found damaged, every other file is verified by reading it, which costs far less than
        computing the block.
        """
        if index in self._damaged or not self.paths[index].exists():
            return False
        if index in self._valid or not self._damaged:
            return True
        try:
            self.read(index)
        except (FileNotFoundError, UnusableBlock):
            return False
        return True

    def stored(self, first: int, last: int) -> int:
        """Return the end of the last existing block from `first` on and before `last`; `first` if there is none."""
        while last > first and not self.paths[last - 1].exists():
            last -= 1
        return max(first, last)


PART = "states"  # in the name of their files, and in the headers
EVERY = 16  # blocks, beside the last one that is saved


def path_of(prompt: Prompt, index: int) -> Path:
    """Return the file of the states behind a block."""
    return prompt.folder.block(prompt.fingerprint, index, prompt.keys[index], PART)


def last_with_states(prompt: Prompt, first: int, last: int, unit: int) -> int:
    """Return the end of the last block from `first` on and before `last` that has states; `first` if there is none.

    Only multiples of `unit` blocks count.
    """
    ends = range(last // unit * unit, first, -unit)
    return next((end for end in ends if path_of(prompt, end - 1).exists()), first)


def read_states(prompt: Prompt, index: int) -> Tensor:
    """Return the states behind a block, as `States.dump` did. Raises FileNotFoundError, UnusableBlock."""
    return read_block(path_of(prompt, index), prompt.keys[index], prompt.ids(index), PART)[0]


THREADS = 2  # reading and hashing release the GIL
AHEAD = 4  # blocks in memory: the one that is used, and those that are read before they are needed


class BlockReader:
    """Reads blocks of a prompt ahead, in order; a context manager that waits for its threads."""

    def __init__(self, prompt: Prompt, blocks: range) -> None:
        self._prompt = prompt
        self._next: Iterator[int] = iter(blocks)
        self._buffers = [Buffer() for _ in range(AHEAD)]
        self._pending: deque[Future[tuple[Tensor, Header]]] = deque()
        self._executor = ThreadPoolExecutor(THREADS, "triforce-prompt-reader")

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def take(self) -> tuple[Tensor, Header]:
        """Return the KV and header of the next block, valid until the next call. Raises as `Prompt.read`."""
        while len(self._pending) < AHEAD - 1 and self._submit():
            pass
        block = self._pending.popleft()
        self._submit()  # into the buffer of the block before this one
        return block.result()

    def _submit(self) -> bool:
        index = next(self._next, None)
        if index is not None:
            buffer = self._buffers[index % AHEAD]
            self._pending.append(self._executor.submit(self._prompt.read, index, buffer))
        return index is not None
