"""Background writer: saves a prompt's blocks in a thread while the next chunk is computed."""

import errno
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor

from ..caches.full import FullCache
from ..errors import Degraded
from ..speculation.passes.runner import Runner
from ..units import size_text
from .block import write_block
from .fingerprint import TOKENS
from .folder import Header, stem_of
from .packing import pack, packing_kernel
from .prompt import EVERY, STATES, Prompt

PATIENCE = 2.0  # seconds; saving may delay the prefill by this and a tenth of the prefill's time
_QUICK = 0.5  # seconds: a prompt that is read faster is not worth its place on the disk
_MEASURED = 0.02  # of the limit is written before the folder, to which others write too, is measured again


class BlockWriter:
    """Saves the blocks of one prompt, if reading it takes long. The first error is a warning and ends saving.

    Attributes:
        saved: tokens of the blocks that were handed to the thread.
    """

    def __init__(self, prompt: Prompt, runner: Runner, cache: FullCache, total: int) -> None:
        """`total`: tokens of the prompt that are to be run."""
        self.saved, self._total = 0, total
        self._prompt, self._runner, self._cache = prompt, runner, cache
        self._kernel = packing_kernel(runner.model.operations.kernel, runner.model.device)
        self._places = prompt.cache.places
        self._now = time.time()
        self._next = 0  # the first block that is not saved yet
        self._tokens = 0  # that were run
        self._seconds = self._delay = 0.0  # of running them, and by which saving has delayed the prefill
        self._size: int | None = None  # bytes in the folder; None until the first write
        self._unmeasured = 0  # bytes written since the folder was measured
        self._executor: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._stopped = False

    def save(self, end: int, tokens: int, seconds: float) -> None:
        """Save the blocks before number `end` that are in the runner's cache.

        `tokens` tokens have been run since the last call, in `seconds`. Blocks that were cached before are saved too.
        """
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens <= 0:
            return  # nothing was run yet
        if self._tokens == tokens and self._prompt.cache.least and seconds / tokens * self._total < _QUICK:
            self._stopped = True  # without a word: by the rate of the first chunk, the next run is as quick
        whole = min(self._runner.num_cached // TOKENS, end)
        for index in range(self._next, whole):
            if self._stopped:
                break
            started = time.perf_counter()
            if not self._prompt.paths[index].exists():
                self._submit_block(index)
                self.saved += TOKENS
            if not (index + 1) % EVERY or index + 1 == end:
                self._submit_states(index)
            self._limit_delay(time.perf_counter() - started)
        self._next = max(whole, self._next)

    def _submit_block(self, index: int) -> None:
        start = index * TOKENS
        if not self._cache.holds(start):  # windows have gone on; the blocks behind would not be restored
            self._stop("the first tokens have left the windows; hint: --set prefill_chunk=512")
            return
        self._submit(index, self._prompt.paths[index], partial(self._cache.dump, start, start + TOKENS))

    def _submit_states(self, index: int) -> None:
        """Save the states of layers with linear attention behind a block, if they can be computed."""
        states, path, length = self._cache.states, self._prompt.states_path(index), (index + 1) * TOKENS
        if states is not None and states.covers(length) and not path.exists():
            self._submit(index, path, partial(states.dump, length), STATES)

    def _submit(self, index: int, path: Path, dump: Callable[[], Tensor], part: str | None = None) -> None:
        """Copy a tensor and let the thread write it, once there is a place for a further copy."""
        self._executor = self._executor or ThreadPoolExecutor(1, "triforce-prompts")
        header = self._prompt.header(index, self._now, part)
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
        folder, ranks, tensors = self._prompt.folder, self._prompt.cache.group.mates, pack(copy, self._kernel)
        need = ranks * sum(tensor.nbytes for tensor in tensors.values())  # every rank writes as much
        if self._size is None or self._unmeasured > folder.limit * _MEASURED:
            folder.sweep()
            self._size, self._unmeasured = folder.size, 0
        if self._size + need > folder.limit:
            self._make_room(need, 0 if header.part == STATES else index)
        folder.make(self._prompt.fingerprint)
        size = ranks * write_block(path, header, tensors)
        self._size += size
        self._unmeasured += size
        folder.touch(path, self._now)

    def _make_room(self, need: int, index: int) -> None:
        """Evict until `need` bytes and a tenth of the limit are free, beside `index` such blocks. Raises OSError."""
        folder = self._prompt.folder
        if need * (index + 1) <= folder.limit:  # else it is full even with all other prompts evicted
            own = {stem_of(path) for path in self._prompt.paths}
            folder.shrink(max(folder.limit - need - folder.limit // 10, 0), keep=own)
        self._size, self._unmeasured = folder.size, 0
        if self._size + need > folder.limit:
            raise OSError(errno.EDQUOT, f"its limit of {size_text(folder.limit)} is reached")

    def _limit_delay(self, seconds: float) -> None:
        """Add a block's delay, and stop saving when prefill has become as slow as the disk."""
        self._delay += seconds
        if self._delay > PATIENCE + self._seconds / 10 and not self._stopped:
            self._stop("the disk is slower than the prefill")

    def _stop(self, reason: str) -> None:
        self._stopped, folder = True, self._prompt.folder
        if reason not in folder.complaints:
            folder.complaints.add(reason)
            text = f"the prompt cache is not saved any further: {reason} ({folder.path})"
            warnings.warn(text, Degraded, stacklevel=2)

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
        for index in range(self._next):
            self._prompt.folder.touch(self._prompt.paths[index], self._now)
            if self._cache.states is not None:
                self._prompt.folder.touch(self._prompt.states_path(index), self._now)
