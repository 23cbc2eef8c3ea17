"""One prompt as a chain of blocks, and where each of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..parallel import Group
from .block import read_block
from .fingerprint import TOKENS, chain
from .folder import PromptFolder
from .header import Header, UnusableBlock


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a model's prompts are kept, and what their blocks say of themselves.

    `model` and `label` are for people; `part` says which heads these are, where each rank of the group has its own.
    """

    folder: PromptFolder
    group: Group
    model: str
    label: str

    @property
    def part(self) -> str:
        """Return "" where there is one rank."""
        return f"{self.group.rank + 1}of{self.group.size}" if self.group.size > 1 else ""


class Prompt:
    """The whole blocks of a prompt: `keys` and `paths`, in order."""

    def __init__(self, storage: Storage, fingerprint: str, ids: Sequence[int]) -> None:
        self.storage, self.fingerprint = storage, fingerprint
        self._ids = list(ids)
        self._sound: set[int] = set()  # blocks that were read
        self._damaged: set[int] = set()  # those whose files are to be replaced
        self.keys = list(chain(fingerprint, self._ids))
        self.paths = [self.folder.block(fingerprint, *each, storage.part) for each in enumerate(self.keys)]

    @property
    def folder(self) -> PromptFolder:
        return self.storage.folder

    def ids(self, index: int) -> list[int]:
        """A block's tokens."""
        return self._ids[index * TOKENS : (index + 1) * TOKENS]

    def read(self, index: int) -> tuple[Tensor, Tensor, Header]:
        """A block's keys and values. Raises FileNotFoundError, UnusableBlock."""
        try:
            block = read_block(self.paths[index], self.keys[index], self.ids(index), self.storage.part)
        except UnusableBlock:
            self._damaged.add(index)
            raise
        self._sound.add(index)
        return block

    def is_kept(self, index: int) -> bool:
        """Whether a block need not be saved, as its file is there.

        Once a file was found damaged, none is trusted unread: reading it costs far less than computing the block.
        """
        if index in self._damaged or not self.paths[index].exists():
            return False
        if index in self._sound or not self._damaged:
            return True
        try:
            self.read(index)
        except (FileNotFoundError, UnusableBlock):
            return False
        return True

    def stored(self, first: int, last: int) -> int:
        """The end of the run of blocks from `first` on, before `last`, that are there."""
        while first < last and self.paths[first].exists():
            first += 1
        return first
