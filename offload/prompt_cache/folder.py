"""Where blocks lie on disk, how much they may take, and which of them go first. Knows no torch and no terminal."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import Caching
from ..files import TEMPORARY

SUFFIX = ".safetensors"
_HITS = ".hits"
_STALE = 3600.0  # seconds: nobody writes a block for so long


@dataclass(frozen=True, slots=True)
class Stored:
    """A block's file. `used`: seconds since the epoch, the same for all blocks that were used together."""

    path: Path
    size: int
    used: float

    @property
    def index(self) -> int:
        """Its place in its prompt, from 0."""
        return int(self.path.name.partition("-")[0])


class PromptFolder:
    """A folder of blocks, one sub-folder for every fingerprint, of at most `limit` bytes.

    Any number of processes may use it at once: files come by renaming and go by unlinking, and nobody needs a lock.
    """

    def __init__(self, path: Path, limit: int = Caching().cache_limit) -> None:
        self.path = path
        self.limit = limit

    def block(self, fingerprint: str, index: int, key: str, part: str = "") -> Path:
        """Where a block belongs; `part` tells apart those who hold different heads of the same one."""
        name = "-".join(filter(None, (f"{index:06d}", key[:32], part)))
        return self.path / fingerprint[:16] / f"{name}{SUFFIX}"

    def make(self, fingerprint: str) -> None:
        """Make the folders, closed to others: what is in them contains the document. Raises OSError."""
        for folder in (self.path, self.path / fingerprint[:16]):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def blocks(self) -> Iterator[Stored]:
        """Every block there is."""
        for path in self.path.glob(f"*/[0-9][0-9][0-9][0-9][0-9][0-9]-*{SUFFIX}"):
            with suppress(OSError):
                state = path.stat()
                if stat.S_ISREG(state.st_mode):
                    yield Stored(path, state.st_size, state.st_mtime)

    def touch(self, path: Path, now: float) -> None:
        """A block is used at this time."""
        with suppress(OSError):
            os.utime(path, (now, now))

    def hit(self, path: Path) -> None:
        """A prompt has taken over what is stored, up to this block. One byte a time: appending needs no lock."""
        with suppress(OSError), open(path.with_suffix(_HITS), "ab", opener=_private) as file:
            file.write(b"+")

    def hits(self, path: Path) -> int:
        """How often prompts have ended their taking over at this block."""
        try:
            return path.with_suffix(_HITS).stat().st_size
        except OSError:
            return 0

    def remove(self, path: Path) -> None:
        """A block and its hits; another process may have been quicker."""
        for each in (path, path.with_suffix(_HITS)):
            with suppress(OSError):
                each.unlink()

    def shrink(self, limit: int, before: float | None = None, keep: Collection[str] = ()) -> int:
        """Remove the least recently used blocks until at most `limit` bytes are left; returns the bytes that went.

        Of blocks used together the last of the prompt go first: what is left can still be used. With `before`, only
        what was used before that time goes; blocks whose `stem_of` is in `keep` stay.
        """
        blocks = sorted(self.blocks(), key=lambda block: (block.used, -block.index))
        total, gone = sum(block.size for block in blocks), 0
        for block in blocks:
            if total - gone <= limit or (before is not None and block.used >= before):
                break
            if stem_of(block.path) not in keep:
                self.remove(block.path)
                gone += block.size
        self._sweep()
        return gone

    def clear(self) -> int:
        """Remove everything, also what others are writing; returns the bytes that went."""
        gone = 0
        for block in self.blocks():
            self.remove(block.path)
            gone += block.size
        self._sweep(0.0)
        return gone

    def _sweep(self, age: float = _STALE) -> None:
        """What interrupted writers have left so long ago, hits without a block, and folders without anything."""
        for path in (*self.path.glob(f"*/{TEMPORARY}*"), *self.path.glob(f"{TEMPORARY}*")):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()
        for path in self.path.glob(f"*/*{_HITS}"):
            if not path.with_suffix(SUFFIX).exists():
                with suppress(OSError):
                    path.unlink()
        for folder in self.path.glob("*/"):
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def stem_of(path: Path) -> str:
    """A block's name without its part."""
    return "-".join(path.stem.split("-")[:2])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
