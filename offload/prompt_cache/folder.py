"""The prompt cache's folder: headers and paths of blocks, the size limit, and LRU eviction. Imports no torch."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..settings.config import Caching
from ..settings.kv_formats import BF16
from ..system.files import TEMPORARY

SUFFIX = ".safetensors"
_STALE = 3600.0  # seconds; writing a block never takes so long


class UnusableBlock(Exception):
    """A file that is damaged, or is not the block that its name says."""


@dataclass(frozen=True, slots=True)
class Header:
    """Identity of a block. `created` in seconds since the epoch."""

    key: str
    parent: str  # the key of the block before it, "" for the first
    part: str  # the rank's share of the heads, "" for all
    model: str
    label: str  # display name of the prompt
    created: float
    kv: str = BF16  # the format of keys and values

    def texts(self) -> dict[str, str]:
        """Return safetensors metadata, with bytes that are not UTF-8 (as in file names) replaced."""
        return {name: str(value).encode("utf-8", "replace").decode() for name, value in asdict(self).items()}

    @classmethod
    def read(cls, texts: dict[str, str]) -> Header:
        """Parse safetensors metadata. Raises UnusableBlock."""
        try:
            names = {name: texts[name] for name in ("key", "parent", "part", "model", "label", "kv")}
            return cls(created=float(texts["created"]), **names)
        except (KeyError, ValueError) as error:
            raise UnusableBlock(f"its header is wrong: {error}") from None


def read_header(path: Path) -> Header:
    """Read a file's header, without its tensors. Raises FileNotFoundError, UnusableBlock."""
    try:
        with safe_open(path, framework="np") as file:
            return Header.read(file.metadata() or {})
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise UnusableBlock(str(error)) from error


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

    @property
    def size(self) -> int:
        """Return the bytes of all blocks."""
        return sum(block.size for block in self.blocks())

    def block(self, fingerprint: str, index: int, key: str, part: str = "") -> Path:
        """Return the path of a block; `part` distinguishes ranks that have different heads of it."""
        name = "-".join(filter(None, (f"{index:06d}", key[:32], part)))
        return self.path / fingerprint[:16] / f"{name}{SUFFIX}"

    def make(self, fingerprint: str) -> None:
        """Create the folders, accessible to the owner only because the blocks contain the document. Raises OSError."""
        for folder in (self.path, self.path / fingerprint[:16]):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _glob(self, pattern: str) -> list[Path]:
        """Return what matches. Path.glob fails where another process removes a folder meanwhile."""
        return [self.path / name for name in glob.glob(pattern, root_dir=self.path)]

    def blocks(self) -> Iterator[Stored]:
        """Yield the files of all blocks, in no order."""
        for path in self._glob(f"*/[0-9][0-9][0-9][0-9][0-9][0-9]-*{SUFFIX}"):
            with suppress(OSError):  # another process has removed it
                state = path.stat()
                yield Stored(path, state.st_size, state.st_mtime)

    def touch(self, path: Path, now: float) -> None:
        """Set the time at which a block was last used."""
        with suppress(OSError):
            os.utime(path, (now, now))

    def remove(self, path: Path) -> None:
        """Remove a file, unless another process already has."""
        with suppress(OSError):
            path.unlink()

    def shrink(self, limit: int, before: float | None = None, keep: Collection[str] = ()) -> int:
        """Remove the least recently used blocks until at most `limit` bytes are left; return the bytes removed.

        Of one prompt's blocks the last are removed first, so that the rest remain a usable prefix. With `before`,
        remove only blocks that were last used before that time. Blocks whose `stem_of` is in `keep` are not removed.
        """
        blocks = sorted(self.blocks(), key=lambda block: (block.used, -block.index))
        total, removed = sum(block.size for block in blocks), 0
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
        removed = self.shrink(0)
        self.sweep(0.0)
        for folder in self._glob("*/"):
            with suppress(OSError):  # not empty
                folder.rmdir()
        return removed

    def sweep(self, age: float = _STALE) -> None:
        """Remove temporary files that are at least `age` seconds old: a process that was killed has left them."""
        for path in (*self._glob(f"*/{TEMPORARY}*"), *self._glob(f"{TEMPORARY}*")):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()


def stem_of(path: Path) -> str:
    """Return a block's file name without its part and suffix."""
    return "-".join(path.stem.split("-")[:2])
