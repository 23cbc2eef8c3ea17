"""One prompt as a chain of blocks, and where each of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from .block import read_block
from .folder import PromptFolder
from .header import Header
from .identity import TOKENS, chain

if TYPE_CHECKING:
    from .cache import PromptCache


class Prompt:
    """The whole blocks of a prompt: `keys` and `paths`, in order."""

    def __init__(self, cache: PromptCache, fingerprint: str, ids: Sequence[int]) -> None:
        self.cache, self.fingerprint = cache, fingerprint
        self._ids = list(ids)
        self.bad: set[Path] = set()  # files that were no use, and are to be replaced
        self.keys = list(chain(fingerprint, self._ids))
        self.paths = [self.folder.block(fingerprint, *each, cache.part) for each in enumerate(self.keys)]

    @property
    def folder(self) -> PromptFolder:
        return self.cache.folder

    @property
    def tokens(self) -> int:
        """All of them, also behind the last whole block."""
        return len(self._ids)

    def ids(self, index: int) -> list[int]:
        """A block's tokens."""
        return self._ids[index * TOKENS : (index + 1) * TOKENS]

    def read(self, index: int) -> tuple[Tensor, Tensor, Header]:
        """A block's keys and values. Raises FileNotFoundError, UnusableBlock."""
        return read_block(self.paths[index], self.keys[index], self.ids(index), self.cache.part)

    def stored(self, first: int, last: int) -> int:
        """The end of the run of blocks from `first` on, before `last`, that are there."""
        while first < last and self.paths[first].exists():
            first += 1
        return first
