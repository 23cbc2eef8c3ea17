"""Saves a prompt's blocks while it is read, in a thread of its own: the disk works while the next chunk computes."""

from __future__ import annotations

import errno
import time
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from ..errors import Degraded
from ..files import sync_folder
from ..speculation.runner import Runner
from ..units import size_text
from .block import write_block
from .chain import Prompt
from .fingerprint import TOKENS
from .folder import stem_of
from .header import Header

_HEADER = 2048  # bytes of a file beside keys and values, about
PATIENCE = 2.0  # seconds that saving may take, beside a tenth of the time that the prompt takes
_UNDER_WAY = 2  # blocks in memory that are not on disk yet


class BlockWriter:
    """Saves the blocks of one prompt; what goes wrong is a warning, and the end of saving."""

    def __init__(self, prompt: Prompt, runner: Runner) -> None:
        self._prompt, self._runner = prompt, runner
        self._now = time.time()
        self._next = 0
        self._run = 0  # tokens
        self._seconds = 0.0  # that running them took
        self._spent = 0.0  # seconds that saving took of the reader's time
        self._size: int | None = None  # bytes in the folder, once that is known
        self._threads: ThreadPoolExecutor | None = None
        self._pending: deque[Future[int]] = deque()
        self._stopped = self._wrote = False

    def save(self, end: int, tokens: int, seconds: float) -> None:
        """Save the blocks before number `end` that the runner holds by now.

        So many tokens have been run since the last call, and it took so long. What was held before is saved too, as if
        it had been run at the same pace.
        """
        self._run += tokens
        self._seconds += seconds
        if self._run <= 0:
            return  # the pace is not known yet
        whole = min(self._runner.num_cached // TOKENS, end)
        for index in range(self._next, whole):
            if self._stopped:
                break
            begun = time.perf_counter()
            if not self._prompt.is_kept(index):
                self._submit(index, self._seconds / self._run * TOKENS)
            self._judge(time.perf_counter() - begun)
        self._next = max(whole, self._next)

    def _submit(self, index: int, seconds: float) -> None:
        prompt, start = self._prompt, index * TOKENS
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "triforce-prompts")
        keys, values = self._runner.cache.store.export(start, start + TOKENS)
        parent = prompt.keys[index - 1] if index else ""
        storage = prompt.storage
        header = Header(prompt.keys[index], parent, storage.part, storage.model, storage.label, self._now, seconds)
        while len(self._pending) >= _UNDER_WAY:
            self._settle()
        if not self._stopped:
            self._pending.append(self._threads.submit(self._write, index, header, keys, values))

    def _write(self, index: int, header: Header, keys, values) -> None:
        prompt, path = self._prompt, self._prompt.paths[index]
        need = keys.nbytes + values.nbytes + _HEADER
        if self._size is None:
            self._size = sum(block.size for block in prompt.folder.blocks())
        if self._size + need > prompt.folder.limit:
            self._make_room(need, index)
        try:
            prompt.folder.make(prompt.fingerprint)
            size = write_block(path, header, prompt.ids(index), keys, values)
        except FileNotFoundError:  # another process has just removed the folder, because it was empty
            prompt.folder.make(prompt.fingerprint)
            size = write_block(path, header, prompt.ids(index), keys, values)
        self._size += size * prompt.storage.group.mates  # the others write theirs
        prompt.folder.touch(path, self._now)
        self._wrote = True

    def _make_room(self, need: int, index: int) -> None:
        """A tenth more than is needed, so that not every block has to look for some."""
        folder = self._prompt.folder
        full = OSError(errno.EDQUOT, f"its limit of {size_text(folder.limit)} is reached")
        if (need - _HEADER) * (index + 1) * self._prompt.storage.group.mates > folder.limit:
            raise full  # though everybody else's went
        own = {stem_of(path) for path in self._prompt.paths}
        folder.shrink(max(folder.limit - need - folder.limit // 10, 0), keep=own)
        self._size = sum(block.size for block in folder.blocks())
        if self._size + need > folder.limit:
            raise full

    def _judge(self, seconds: float) -> None:
        """A block has taken so much of the reader's time: reading must not become as slow as the disk."""
        self._spent += seconds
        if self._spent > PATIENCE + self._seconds / 10 and not self._stopped:
            self._stop("the disk is slower than the prompt is read")

    def _stop(self, reason: str) -> None:
        where = self._prompt.folder.path
        warnings.warn(f"the prompt cache is not saved any further: {reason} ({where})", Degraded, stacklevel=2)
        self._stopped = True

    def _settle(self) -> None:
        """Wait for the oldest block."""
        try:
            self._pending.popleft().result()
        except Exception as error:  # whatever it is: the prompt has been read, and the answer can be had
            if not self._stopped:
                self._stop(getattr(error, "strerror", None) or str(error) or type(error).__name__)

    def close(self) -> None:
        """Everything that was begun is on disk, and the prompt's blocks count as used together."""
        while self._pending:
            self._settle()
        if self._threads is not None:
            self._threads.shutdown()
        for path in self._prompt.paths[: self._next]:
            self._prompt.folder.touch(path, self._now)
        if self._wrote:
            with suppress(OSError):  # another process has removed it
                sync_folder(self._prompt.paths[0].parent)
