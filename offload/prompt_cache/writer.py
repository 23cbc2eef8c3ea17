"""Background writer: saves a prompt's blocks in a thread while the next chunk is computed."""

import errno
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Semaphore

from torch import Tensor

from ..errors import Degraded
from ..speculation.passes.runner import Runner
from ..system.files import sync_folder
from ..units import size_text
from .block import pack, packing_kernel, write_block
from .chain import EVERY, PART, Prompt, path_of
from .fingerprint import TOKENS
from .folder import Header, stem_of

_HEADER = 2048  # bytes of a file besides the KV, approximately
PATIENCE = 2.0  # seconds; saving may delay the prefill by this and a tenth of the prefill's time
_TRIES = 5  # of a write, while other processes clear the folder, and of an eviction, while they fill it
_MEASURED = 0.02  # of the limit is written before the folder, to which others write too, is measured again
MOST_COPIED = 2  # blocks copied for the threads and not written yet, of all writers of a cache together


class BlockWriter:
    """Saves the blocks of one prompt. The first error is a warning and ends saving."""

    def __init__(self, prompt: Prompt, runner: Runner, places: Semaphore) -> None:
        """`places` has one for each block that may be copied at a time, and is shared by the writers of a cache."""
        self._prompt, self._runner, self._places = prompt, runner, places
        self._kernel = packing_kernel(runner.model.operations.kernel, runner.model.device)
        self._now = time.time()
        self._next = 0
        self._tokens = 0  # that were run
        self._seconds = 0.0  # of running them
        self._delay = 0.0  # seconds by which saving delayed the prefill
        self._size: int | None = None  # bytes in the folder; None until the first write
        self._unmeasured = 0  # bytes written since the folder was measured
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
            if (not (index + 1) % EVERY or index + 1 == end) and not self._stopped:
                self._submit_states(index, seconds)
            self._limit_delay(time.perf_counter() - start)
        self._next = max(whole, self._next)

    def _submit_block(self, index: int, seconds: float) -> None:
        start = index * TOKENS
        if not self._runner.cache.holds(start):  # windows have gone on; the blocks behind would not be restored
            self._stop("the first tokens have left the windows; hint: --set prefill_chunk=512")
            return
        dump = partial(self._runner.cache.dump, start, start + TOKENS)
        self._submit(index, seconds, self._prompt.paths[index], dump)

    def _submit_states(self, index: int, seconds: float) -> None:
        """Save the states of layers with linear attention behind a block, if they can be computed."""
        states, path = self._runner.cache.states, path_of(self._prompt, index)
        if states is not None and states.covers((index + 1) * TOKENS) and not path.exists():
            self._submit(index, seconds, path, partial(states.dump, (index + 1) * TOKENS), PART)

    def _submit(
        self, index: int, seconds: float, path: Path, dump: Callable[[], Tensor], part: str | None = None
    ) -> None:
        prompt = self._prompt
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "triforce-prompts")
        parent = prompt.keys[index - 1] if index else ""
        storage = prompt.storage
        names = storage.part if part is None else part, storage.model, storage.label
        header = Header(prompt.keys[index], parent, *names, self._now, seconds, storage.kv)
        self._places.acquire()
        try:
            while self._pending and self._pending[0].done():
                self._settle()
            if self._stopped:
                self._places.release()
                return
            self._pending.append(self._executor.submit(self._write, index, path, header, [dump()]))
        except BaseException:
            self._places.release()
            raise

    def _write(self, index: int, path: Path, header: Header, copied: list[Tensor]) -> None:
        """Write the tensor that is `copied`, and drop it, before the next one may be."""
        try:
            self._write_file(index, path, header, copied.pop())
        except Exception as error:
            raise error.with_traceback(None) from None  # its frames hold the tensor
        finally:
            self._places.release()

    def _write_file(self, index: int, path: Path, header: Header, copy: Tensor) -> None:
        prompt, kv = self._prompt, pack(copy, self._kernel)
        size = sum(tensor.nbytes for tensor in kv.values())
        need = (size + _HEADER) * prompt.storage.group.mates  # every rank writes as much
        if self._size is None or self._unmeasured > prompt.folder.limit * _MEASURED:
            prompt.folder.sweep()  # what a process that was killed has left
            self._measure()
        if self._size + need > prompt.folder.limit:
            self._make_room(need, 0 if header.part == PART else index)
        for remaining in range(_TRIES, 0, -1):
            try:
                prompt.folder.make(prompt.fingerprint)
                size = write_block(path, header, prompt.ids(index), kv)
                break
            except FileNotFoundError:  # another process has just removed the file, or the folder while it was empty
                if remaining == 1:
                    raise
        size *= prompt.storage.group.mates
        self._size += size
        self._unmeasured += size
        prompt.folder.touch(path, self._now)
        self._wrote = True

    def _make_room(self, need: int, index: int) -> None:
        """Evict until `need` bytes and a tenth of the limit are free. Raises OSError if full."""
        folder = self._prompt.folder
        full = OSError(errno.EDQUOT, f"its limit of {size_text(folder.limit)} is reached")
        if (need - _HEADER * self._prompt.storage.group.mates) * (index + 1) > folder.limit:
            raise full  # even with all other prompts evicted
        own = {stem_of(path) for path in self._prompt.paths}
        for _ in range(_TRIES):
            removed = folder.shrink(max(folder.limit - need - folder.limit // 10, 0), keep=own)
            if self._measure() + need <= folder.limit:
                return
            if not removed:
                break  # else other processes have filled it again
        raise full

    def _measure(self) -> int:
        """Return the bytes in the folder, which other processes write to as well."""
        self._size, self._unmeasured = sum(block.size for block in self._prompt.folder.blocks()), 0
        return self._size

    def _limit_delay(self, seconds: float) -> None:
        """Add a block's delay, and stop saving when prefill has become as slow as the disk."""
        self._delay += seconds
        if self._delay > PATIENCE + self._seconds / 10 and not self._stopped:
            self._stop("the disk is slower than the prefill")

    def _stop(self, reason: str) -> None:
        self._stopped, folder = True, self._prompt.folder
        if reason not in folder.complaints:
            folder.complaints.add(reason)
            where = folder.path
            warnings.warn(f"the prompt cache is not saved any further: {reason} ({where})", Degraded, stacklevel=2)

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
