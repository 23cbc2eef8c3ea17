"""A store of blocks that several machines share: any URL that fsspec opens, such as s3://bucket/prefix.

Blocks are fetched into the folder before a prompt is restored, and put after they have been written there. Both are
done by threads that may be left waiting: a store that hangs, fails or lies costs a prompt PATIENCE seconds, and no run.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import Degraded, SettingsError
from ..short_repr import first_line
from ..system.daemon_threads import DaemonThreads
from ..system.files import replace_file
from .block import verify_block
from .chain import EVERY, PART, Prompt, path_of
from .folder import Header, PromptFolder, UnusableBlock, stem_of

PATIENCE = 2.0  # seconds by which fetching may delay a prompt, beyond what computing the fetched blocks would take
AHEAD = 4  # blocks that are fetched at a time
GETS, PUTS = 2, 3  # tries
PAUSE = 0.25  # seconds after the first try of a put; four times as many after each further one
FAILURES = 3  # calls in a row that fail: then the store is left alone
REST = 60.0  # for so many seconds
DRAIN = 30.0  # seconds that the end of a process waits for puts
_S3 = {"connect_timeout": 2, "read_timeout": 10, "retries": {"max_attempts": 1}}  # of botocore


class BlockStore:
    """Blocks at a URL, under the names that they have in the folder."""

    def __init__(self, url: str) -> None:
        """Check the URL; nothing is connected yet. Raises SettingsError."""
        import fsspec

        self.url = url
        protocol, _, path = url.partition("://")
        hint = "use a URL such as s3://bucket/prefix, or file:///shared/prompts"
        if not protocol or not path or (protocol == "file" and path[0] != "/"):
            raise SettingsError(f"--cache-store {url} is no URL", hint)
        if "@" in path.partition("/")[0]:
            raise SettingsError(
                f"--cache-store {protocol}://… has a name or a password in it, and messages show the URL",
                "give them in the environment (AWS_ACCESS_KEY_ID), or in the files of your provider's tools",
            )
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            raise SettingsError(f"--cache-store {url}: {error}", hint) from None
        except ImportError as error:
            hint = 'pip install ".[store]" has that of s3://; others have packages of their own'
            raise SettingsError(f"--cache-store {url}: {error}", hint) from None
        options = {"config_kwargs": _S3} if protocol in ("s3", "s3a") else {}
        self._open: Callable[[], tuple[Any, str]] = lambda: fsspec.core.url_to_fs(url, **options)
        self._opened: tuple[Any, str] | None = None
        self._lock = threading.Lock()
        self._gets, self._puts = DaemonThreads(AHEAD, "store-get"), DaemonThreads(1, "store-put")
        self._damaged: set[str] = set()  # names of blocks to replace
        self._failures, self._rests_until = 0, 0.0
        self._reasons: deque[str] = deque()  # to be told by the thread that runs prompts
        self._told: set[str] = set()

    def fetch(self, prompt: Prompt, first: int, with_states: bool) -> None:
        """Fetch the blocks from number `first` on that the folder lacks, up to the first that the store lacks too.

        Ends when this has taken PATIENCE seconds more than computing the fetched blocks would have. `with_states`:
        also the states behind the last of them that has any. Warns of what fails, and raises nothing.
        """
        missing = [index for index in range(first, len(prompt.keys)) if not prompt.paths[index].exists()]
        if not missing or self._is_resting():
            return
        deadline, room = _Deadline(), _Room(prompt)
        try:
            self._fetch_blocks(prompt, missing, deadline, room)
            if with_states:
                self._fetch_states(prompt, first, prompt.stored(first, len(prompt.keys)), deadline, room)
        except _Stop as stop:
            self._reasons.append(str(stop))
        self._warn()

    def _fetch_blocks(self, prompt: Prompt, indices: list[int], deadline: _Deadline, room: _Room) -> None:
        """Fetch blocks in order: the first alone, which tells whether the store has any."""
        waiting, left, ahead = deque[Future[Header | None]](), iter(indices), 1
        try:
            while True:
                while len(waiting) < ahead and (index := next(left, None)) is not None:
                    waiting.append(self._gets.submit(self._get, prompt, prompt.paths[index], index, "", room))
                if not waiting or (header := self._wait(waiting.popleft(), deadline)) is None:
                    return
                deadline.at += header.prefill_s
                ahead = AHEAD
        finally:
            for each in waiting:
                each.cancel()

    def _fetch_states(self, prompt: Prompt, first: int, end: int, deadline: _Deadline, room: _Room) -> None:
        """Fetch the last states behind a block before number `end`: at that, or at a multiple of EVERY blocks."""
        for place in (end, *range(end // EVERY * EVERY, first, -EVERY)):
            if place <= first or path_of(prompt, place - 1).exists():
                return
            arriving = self._gets.submit(self._get, prompt, path_of(prompt, place - 1), place - 1, PART, room)
            if self._wait(arriving, deadline) is not None:
                return

    def _wait(self, arriving: Future[Header | None], deadline: _Deadline) -> Header | None:
        """Return the header of a block once it is in the folder, or None. Raises _Stop."""
        try:
            return arriving.result(max(deadline.at - time.monotonic(), 0))
        except TimedOut:
            arriving.cancel()
            self._failed()
            raise _Stop(f"it took more than {PATIENCE:g} s beyond what computing takes") from None

    def _get(self, prompt: Prompt, path: Path, index: int, part: str, room: _Room) -> Header | None:
        """Copy a block from the store into the folder; None if the store has none that is sound. Raises _Stop."""
        name = self._name(path)
        for remaining in reversed(range(GETS)):
            try:
                fs, root = self._connected()
                data = fs.cat_file(f"{root}/{name}")
                own = prompt.keys[index], prompt.ids(index), part or prompt.storage.part
                header, _ = verify_block(np.frombuffer(bytearray(data), np.uint8), *own)
                break
            except FileNotFoundError:
                self._failures = 0
                return None
            except UnusableBlock as error:  # cut on the way, or damaged there
                if not remaining:
                    self._damaged.add(name)
                    self._reasons.append(f"{name}: {error}")
                    return None
            except Exception as error:
                if not remaining:
                    self._failed()
                    raise _Stop(first_line(error)[:200]) from None
        self._failures = 0
        room.write(path, data)
        return header

    def put(self, path: Path) -> None:
        """Put a file of the folder into the store, later; it may have been removed by then."""
        if not self._is_resting():
            self._puts.submit(self._put, path)

    def _put(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError:  # evicted
            return
        name, pause = self._name(path), PAUSE
        for remaining in reversed(range(PUTS)):
            if self._is_resting():
                return
            try:
                fs, root = self._connected()
                if name in self._damaged or not fs.exists(f"{root}/{name}"):
                    if getattr(fs, "auto_mkdir", True) is False:  # a local one; stores of objects have no folders
                        fs.makedirs(f"{root}/{path.parent.name}", exist_ok=True)
                    fs.pipe_file(f"{root}/{name}", data)
                    self._damaged.discard(name)
                self._failures = 0
                return
            except Exception as error:
                self._damaged.add(name)  # a part of it may be there
                if not remaining:
                    self._remove(name)
                    self._failed()
                    self._reasons.append(first_line(error)[:200])
                    return
            time.sleep(pause)
            pause *= 4

    def _remove(self, name: str) -> None:
        """Remove what a put has left in a local store, such as on a full disk."""
        if self._opened is not None and getattr(self._opened[0], "auto_mkdir", True) is False:
            with suppress(OSError):
                self._opened[0].rm_file(f"{self._opened[1]}/{name}")

    def drain(self) -> None:
        """Wait for puts, for DRAIN seconds at most, and warn of those that are left."""
        if left := self._puts.wait(DRAIN):
            self._reasons.append(f"not all was put there within {DRAIN:g} s: {left:,} blocks are left")
        self._warn()

    def _connected(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                fs, root = self._open()
                self._opened = fs, root.rstrip("/")
            return self._opened

    def _name(self, path: Path) -> str:
        return f"{path.parent.name}/{path.name}"

    def _is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            self._rests_until, self._failures = time.monotonic() + REST, 0

    def _warn(self) -> None:
        """Warn of what failed; of each reason once, whatever block it was."""
        while self._reasons:
            reason = self._reasons.popleft()
            if (kind := reason.rpartition(": ")[2]) not in self._told:
                self._told.add(kind)
                warnings.warn(
                    f"the cache store {self.url} is not used for all blocks: {reason}", Degraded, stacklevel=2
                )


class _Deadline:
    """When fetching ends, by time.monotonic."""

    def __init__(self) -> None:
        self.at = time.monotonic() + PATIENCE


class _Stop(Exception):
    """Fetching ends."""


class _Room:
    """The room for fetched blocks within the folder's limit."""

    def __init__(self, prompt: Prompt) -> None:
        self._folder: PromptFolder = prompt.folder
        self._fingerprint = prompt.fingerprint
        self._own = {stem_of(path) for path in prompt.paths}
        self._size: int | None = None
        self._lock = threading.Lock()

    def write(self, path: Path, data: bytes) -> None:
        """Write a block into the folder. Raises _Stop if it is full, or cannot be written to."""
        folder = self._folder
        with self._lock:
            if self._size is None or self._size + len(data) > folder.limit:
                folder.shrink(max(folder.limit - len(data) - folder.limit // 10, 0), keep=self._own)
                self._size = sum(block.size for block in folder.blocks())
            if self._size + len(data) > folder.limit:
                raise _Stop("the limit of the folder is reached")
            try:
                folder.make(self._fingerprint)
                replace_file(path, data, sync=False)  # a disk that is busy would hold up the prompt
            except OSError as error:
                raise _Stop(f"{error.strerror or error} ({folder.path})") from None
            self._size += len(data)
