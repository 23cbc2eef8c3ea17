"""The prompt cache's folder: paths of blocks, the size limit, and LRU eviction. Imports no torch."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..settings.config import Caching
from ..system.files import TEMPORARY

SUFFIX = ".safetensors"
LATEST = 32503680000.0  # the year 3000, in seconds: the largest time that is believed
_HITS = ".hits"
_STALE = 3600.0  # seconds; writing a block never takes so long


@dataclass(frozen=True, slots=True)
class Stored:
    """A block's file. `used` is its last use in seconds since the epoch, equal for all blocks of one prompt."""

    path: Path
    size: int
    used: float

    @property
    def index(self) -> int:
        """Return the block's number in its prompt, from 0."""
        return int(self.path.name.partition("-")[0])


class PromptFolder:
    """A folder of at most `limit` bytes of blocks, with one sub-folder per fingerprint.

    Any number of processes may use it at once without locks: files appear by rename and disappear by unlink.
    """

    def __init__(self, path: Path, limit: int = Caching().cache_limit) -> None:
        self.path = path
        self.limit = limit
        self.complaints: set[str] = set()  # why prompts were not saved: each reason is said once

    def block(self, fingerprint: str, index: int, key: str, part: str = "") -> Path:
        """Return the path of a block; `part` distinguishes ranks that have different heads of it."""
        name = "-".join(filter(None, (f"{index:06d}", key[:32], part)))
        return self.path / fingerprint[:16] / f"{name}{SUFFIX}"

    def make(self, fingerprint: str) -> None:
        """Create the folders, accessible to the owner only because the blocks contain the document. Raises OSError."""
        for folder in (self.path, self.path / fingerprint[:16]):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def blocks(self) -> Iterator[Stored]:
        """Yield every block."""
        for path in self.path.glob(f"*/[0-9][0-9][0-9][0-9][0-9][0-9]-*{SUFFIX}"):
            with suppress(OSError):
                state = path.stat()
                if stat.S_ISREG(state.st_mode):
                    yield Stored(path, state.st_size, min(max(state.st_mtime, 0.0), LATEST))

    def touch(self, path: Path, now: float) -> None:
        """Set the time at which a block was last used."""
        with suppress(OSError):
            os.utime(path, (now, now))

    def hit(self, path: Path) -> None:
        """Count a restore that ended at this block. One byte per hit, because appending needs no lock."""
        with suppress(OSError), open(path.with_suffix(_HITS), "ab", opener=_private) as file:
            file.write(b"+")

    def hits(self, path: Path) -> int:
        """Return how many restores ended at this block."""
        try:
            return path.with_suffix(_HITS).stat().st_size
        except OSError:
            return 0

    def remove(self, path: Path) -> None:
        """Remove a block and its hit count, unless another process already has."""
        for each in (path, path.with_suffix(_HITS)):
            with suppress(OSError):
                each.unlink()

    def shrink(self, limit: int, before: float | None = None, keep: Collection[str] = ()) -> int:
        """Remove the least recently used blocks until at most `limit` bytes are left; return the bytes removed.

        Of one prompt's blocks the last are removed first, so that the rest remain a usable prefix. With `before`,
        remove only blocks that were last used before that time. Blocks whose `stem_of` is in `keep` are not removed.
        """
        blocks = sorted(self.blocks(), key=lambda block: (block.used, -block.index))
        total, removed, now = sum(block.size for block in blocks), 0, time.time()
        for block in blocks:
            if block.used > now:  # by a clock that was ahead: from now on it ages as others do
                self.touch(block.path, now)
        for block in blocks:
            if total - removed <= limit or (before is not None and block.used >= before):
                break
            if stem_of(block.path) not in keep:
                self.remove(block.path)
                removed += block.size
        self.sweep()
        return removed

    def clear(self) -> int:
        """Remove everything, also files that are being written; return the bytes removed."""
        removed = 0
        for block in self.blocks():
            self.remove(block.path)
            removed += block.size
        self.sweep(0.0)
        return removed

    def sweep(self, age: float = _STALE) -> None:
        """Remove temporary files at least `age` seconds old, hit counts without a block, and empty folders."""
        for path in (*self.path.glob(f"*/{TEMPORARY}*"), *self.path.glob(f"{TEMPORARY}*")):
            with suppress(OSError):
                if abs(time.time() - path.stat().st_mtime) >= age:  # or as far ahead, by a clock that was wrong
                    path.unlink()
        for path in self.path.glob(f"*/*{_HITS}"):
            if not path.with_suffix(SUFFIX).exists():
                with suppress(OSError):
                    path.unlink()
        for folder in self.path.glob("*/"):
            with suppress(OSError):  # not empty
                folder.rmdir()


def stem_of(path: Path) -> str:
    """Return a block's file name without its part and suffix."""
    return "-".join(path.stem.split("-")[:2])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
