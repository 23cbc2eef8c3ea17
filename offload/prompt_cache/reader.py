"""Background reader: threads read and verify a prompt's next blocks while earlier ones are copied into the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from .block import Buffer
from .chain import Prompt
from .header import Header

THREADS = 2  # reading and hashing release the GIL
AHEAD = 4  # blocks in memory: the one that is used, and those that are read before they are needed


class BlockReader:
    """Reads blocks of a prompt ahead, in order; a context manager that waits for its threads."""

    def __init__(self, prompt: Prompt, blocks: range) -> None:
        self._prompt = prompt
        self._next: Iterator[int] = iter(blocks)
        self._buffers = [Buffer() for _ in range(AHEAD)]
        self._pending: deque[Future[tuple[Tensor, Header]]] = deque()
        self._executor = ThreadPoolExecutor(THREADS, "triforce-prompt-reader")

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def take(self) -> tuple[Tensor, Header]:
        """Return the KV and header of the next block, valid until the next call. Raises as `Prompt.read`."""
        while len(self._pending) < AHEAD - 1 and self._submit():
            pass
        block = self._pending.popleft()
        self._submit()  # into the buffer of the block before this one
        return block.result()

    def _submit(self) -> bool:
        index = next(self._next, None)
        if index is not None:
            buffer = self._buffers[index % AHEAD]
            self._pending.append(self._executor.submit(self._prompt.read, index, buffer))
        return index is not None
