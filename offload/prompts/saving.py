"""Saves a prompt's blocks while it is read, in a thread of its own: the disk works while the next chunk computes."""

from __future__ import annotations

import errno
import time
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..errors import Degraded
from ..files import sync_folder
from ..runner import Runner
from ..units import size_text
from .block import write_block
from .folder import stem_of
from .header import Header
from .identity import TOKENS
from .prompt import Prompt

_HEADER = 4096  # bytes of a file beside keys and values, at most
_UNDER_WAY = 2  # blocks in memory that are not on disk yet


class Saver:
    """Saves the blocks of one prompt; what goes wrong is a warning, and the end of saving."""

    def __init__(self, prompt: Prompt, runner: Runner) -> None:
        self._prompt, self._runner = prompt, runner
        self._now = time.time()
        self._next = 0
        self._seconds = 0.0  # that what has been run since the last whole block took
        self._size: int | None = None  # bytes in the folder, once that is known
        self._threads: ThreadPoolExecutor | None = None
        self._pending: deque[Future[int]] = deque()
        self._stopped = self._wrote = False

    def save(self, seconds: float) -> None:
        """Save what the runner holds by now; running what has come since the last call took so long."""
        self._seconds += seconds
        whole = min(self._runner.held // TOKENS, len(self._prompt.paths))
        if whole <= self._next:
            return
        each = self._seconds / (whole - self._next)
        for index in range(self._next, whole):
            if not self._stopped and not self._is_there(self._prompt.paths[index]):
                self._submit(index, each)
        self._next, self._seconds = whole, 0.0

    def _is_there(self, path: Path) -> bool:
        return path not in self._prompt.bad and path.exists()

    def _submit(self, index: int, seconds: float) -> None:
        prompt, start = self._prompt, index * TOKENS
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "triforce-prompts")
        keys, values = self._runner.cache.store.export(start, start + TOKENS)
        parent = prompt.keys[index - 1] if index else ""
        cache = prompt.cache
        header = Header(prompt.keys[index], parent, cache.part, cache.model, cache.label, self._now, seconds)
        while len(self._pending) >= _UNDER_WAY:
            self._settle()
        if not self._stopped:
            run = self._threads.submit(self._write, index, header, keys, values)
            self._pending.append(run)

    def _write(self, index: int, header: Header, keys, values) -> None:
        prompt, path = self._prompt, self._prompt.paths[index]
        prompt.folder.make(prompt.fingerprint)
        need = keys.nbytes + values.nbytes + _HEADER
        if self._size is None:
            self._size = sum(block.size for block in prompt.folder.blocks())
        if self._size + need > prompt.folder.limit:
            self._make_room(need)
        size = write_block(path, header, prompt.ids(index), keys, values)
        self._size += size * prompt.cache.group.size  # the others write theirs
        prompt.folder.touch(path, self._now)
        self._wrote = True

    def _make_room(self, need: int) -> None:
        """A tenth more than is needed, so that not every block has to look for some."""
        folder = self._prompt.folder
        own = {stem_of(path) for path in self._prompt.paths}
        folder.shrink(max(folder.limit - need - folder.limit // 10, 0), keep=own)
        self._size = sum(block.size for block in folder.blocks())
        if self._size + need > folder.limit:
            raise OSError(errno.EDQUOT, f"its limit of {size_text(folder.limit)} is reached")

    def _settle(self) -> None:
        """Wait for the oldest block."""
        try:
            self._pending.popleft().result()
        except OSError as error:
            if not self._stopped:
                reason = f"the prompt cache is not saved any further: {error.strerror} ({self._prompt.folder.path})"
                warnings.warn(reason, Degraded, stacklevel=2)
            self._stopped = True

    def close(self) -> None:
        """Everything that was begun is on disk, and the prompt's blocks count as used together."""
        while self._pending:
            self._settle()
        if self._threads is not None:
            self._threads.shutdown()
        for path in self._prompt.paths[: self._next]:
            self._prompt.folder.touch(path, self._now)
        if self._wrote:
            sync_folder(self._prompt.paths[0].parent)
