"""A prompt as a chain of blocks, and the file of each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..parallel import Group
from .block import Buffer, read_block
from .fingerprint import TOKENS, chain
from .folder import PromptFolder
from .header import Header, UnusableBlock


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
