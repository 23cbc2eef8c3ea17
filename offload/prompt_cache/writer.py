"""Background writer: saves a prompt's blocks in a thread while the next chunk is computed."""

from __future__ import annotations

import errno
import time
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from ..errors import Degraded
from ..files import sync_folder
from ..speculation.runner import Runner
from ..units import size_text
from .block import write_block
from .chain import Prompt
from .fingerprint import TOKENS
from .folder import stem_of
from .header import Header
from .states import PART, are_wanted, path_of

_HEADER = 2048  # bytes of a file besides the KV, approximately
PATIENCE = 2.0  # seconds; saving may delay the prefill by this and a tenth of the prefill's time
_MAX_PENDING = 2  # blocks copied for the thread and not written yet


class BlockWriter:
    """Saves the blocks of one prompt. The first error is a warning and ends saving."""

    def __init__(self, prompt: Prompt, runner: Runner) -> None:
        self._prompt, self._runner = prompt, runner
        self._now = time.time()
        self._next = 0
        self._tokens = 0  # that were run
        self._seconds = 0.0  # of running them
        self._delay = 0.0  # seconds by which saving delayed the prefill
        self._size: int | None = None  # bytes in the folder; None until the first write
        self._executor: ThreadPoolExecutor | None = None
        self._pending: deque[Future[int]] = deque()
        self._stopped = self._wrote = False

    def save(self, end: int, tokens: int, seconds: float) -> None:
        """Save the blocks before number `end` that are in the runner's cache.

        `tokens` tokens have been run since the last call, in `seconds`. Blocks that were cached before are saved too,
        with the same prefill time per token.
        """
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens <= 0:
            return  # the time per token is not known yet
        whole = min(self._runner.num_cached // TOKENS, end)
        for index in range(self._next, whole):
            if self._stopped:
                break
            start = time.perf_counter()
            seconds = self._seconds / self._tokens * TOKENS
            if not self._prompt.is_saved(index):
                self._submit_block(index, seconds)
            if are_wanted(index, end) and not self._stopped:
                self._submit_states(index, seconds)
            self._limit_delay(time.perf_counter() - start)
        self._next = max(whole, self._next)

    def _submit_block(self, index: int, seconds: float) -> None:
        start = index * TOKENS
        if not self._runner.cache.holds(start):  # windows have gone on; the blocks behind would not be restored
            self._stop("the first tokens have left the windows; hint: --prefill-chunk 512")
            return
        self._submit(index, seconds, self._prompt.paths[index], self._runner.cache.dump(start, start + TOKENS))

    def _submit_states(self, index: int, seconds: float) -> None:
        """Save the states of layers with linear attention behind a block, if they can be computed."""
        states, path = self._runner.cache.states, path_of(self._prompt, index)
        if states is not None and states.covers((index + 1) * TOKENS) and not path.exists():
            self._submit(index, seconds, path, states.dump((index + 1) * TOKENS), PART)

    def _submit(self, index: int, seconds: float, path: Path, kv: Tensor, part: str | None = None) -> None:
        prompt = self._prompt
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "triforce-prompts")
        parent = prompt.keys[index - 1] if index else ""
        storage = prompt.storage
        names = storage.part if part is None else part, storage.model, storage.label
        header = Header(prompt.keys[index], parent, *names, self._now, seconds, storage.kv)
        while len(self._pending) >= _MAX_PENDING:
            self._settle()
        if not self._stopped:
            self._pending.append(self._executor.submit(self._write, index, path, header, kv))

    def _write(self, index: int, path: Path, header: Header, kv: Tensor) -> None:
        prompt = self._prompt
        need = kv.nbytes + _HEADER
        if self._size is None:
            prompt.folder.sweep()  # what a process that was killed has left
            self._size = sum(block.size for block in prompt.folder.blocks())
        if self._size + need > prompt.folder.limit:
            self._make_room(need, 0 if header.part == PART else index)
        try:
            prompt.folder.make(prompt.fingerprint)
            size = write_block(path, header, prompt.ids(index), kv)
        except FileNotFoundError:  # another process has just removed the folder while it was empty
            prompt.folder.make(prompt.fingerprint)
            size = write_block(path, header, prompt.ids(index), kv)
        self._size += size * prompt.storage.group.mates  # every rank writes as much
        prompt.folder.touch(path, self._now)
        self._wrote = True

    def _make_room(self, need: int, index: int) -> None:
        """Evict until `need` bytes and a tenth of the limit are free. Raises OSError if full."""
        folder = self._prompt.folder
        full = OSError(errno.EDQUOT, f"its limit of {size_text(folder.limit)} is reached")
        if (need - _HEADER) * (index + 1) * self._prompt.storage.group.mates > folder.limit:
            raise full  # even with all other prompts evicted
        own = {stem_of(path) for path in self._prompt.paths}
        folder.shrink(max(folder.limit - need - folder.limit // 10, 0), keep=own)
        self._size = sum(block.size for block in folder.blocks())
        if self._size + need > folder.limit:
            raise full

    def _limit_delay(self, seconds: float) -> None:
        """Add a block's delay, and stop saving when prefill has become as slow as the disk."""
        self._delay += seconds
        if self._delay > PATIENCE + self._seconds / 10 and not self._stopped:
            self._stop("the disk is slower than the prefill")

    def _stop(self, reason: str) -> None:
        where = self._prompt.folder.path
        warnings.warn(f"the prompt cache is not saved any further: {reason} ({where})", Degraded, stacklevel=2)
        self._stopped = True

    def _settle(self) -> None:
        """Wait for the oldest pending block."""
        try:
            self._pending.popleft().result()
        except Exception as error:  # of any kind: generation can go on without saving
            if not self._stopped:
                self._stop(getattr(error, "strerror", None) or str(error) or type(error).__name__)

    def close(self) -> None:
        """Wait for all pending blocks, and set one time of use for the prompt's blocks."""
        while self._pending:
            self._settle()
        if self._executor is not None:
            self._executor.shutdown()
        for path in self._prompt.paths[: self._next]:
            self._prompt.folder.touch(path, self._now)
        if self._runner.cache.states is not None:
            for index in range(self._next):
                self._prompt.folder.touch(path_of(self._prompt, index), self._now)
        if self._wrote:
            with suppress(OSError):  # another process has removed it
                sync_folder(self._prompt.paths[0].parent)
