"""The thread that generates: a bounded queue of sequences in, their events out, to the event loop that asked."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import InternalError, typed_error
from offload.events import Finished

from .errors import ApiError
from .sequences import ServedSequence


class EngineThread:
    """Runs `Engine.generate_batch` for as long as the server lives. While there is nothing to do the thread sleeps.

    The batch stays open meanwhile: the next question about a document finds the pages of the last one.

    Attributes:
        error: the exception that ended the thread; `gave_up` is called after it.
        waiting, running: the sequences that wait for the engine, and those that it runs.
    """

    def __init__(
        self,
        engine: Engine,
        parallel: int,
        most_waiting: int,
        ended: Callable[[ServedSequence, BatchEvent], None] = lambda sequence, event: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`ended` is called with each sequence and its last event, `failed` with an error that clients are not told."""
        self._engine, self._parallel, self._most = engine, parallel, most_waiting + parallel
        self._ended, self._failed = ended, failed
        self.error: Exception | None = None
        self.gave_up: Callable[[], None] = lambda: None
        self._changed = threading.Condition()  # its lock may be taken again by the thread that has it
        self.waiting: deque[ServedSequence] = deque()
        self.running: set[ServedSequence] = set()
        self._refusal: str | None = None  # why nothing is taken any more
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.start, self.is_alive = self._thread.start, self._thread.is_alive

    def check(self, count: int) -> None:
        """Raise ApiError if so many further sequences may not be queued now."""
        if self._refusal is not None:
            raise ApiError(503, self._refusal, "unavailable")
        if count > self._most:
            raise ApiError(400, f"the request has {count} sequences, and {self._most} are taken at a time", param="n")
        if len(self.waiting) + len(self.running) + count > self._most:
            raise ApiError(429, "too many requests wait", "queue_full", retry_after="2")

    def submit(self, sequences: Sequence[ServedSequence]) -> None:
        """Queue all sequences of a request. Raises ApiError, and queues none, if there are too many with them."""
        with self._changed:
            self.check(len(sequences))
            self.waiting.extend(sequences)
            self._changed.notify()

    def fail(self, message: str) -> None:
        """End all sequences with status 503 and a message, and refuse further ones."""
        with self._changed:
            self._refusal = message
            left = [*self.waiting, *self.running]
            for sequence in left:
                sequence.fail(ApiError(503, message, "unavailable"))
            self.cancel(left)

    def cancel(self, sequences: Sequence[ServedSequence]) -> None:
        """End sequences: those that wait at once, those that run before the next pass."""
        with self._changed:
            for sequence in sequences:
                sequence.is_cancelled = True
                if sequence in self.waiting:
                    self.waiting.remove(sequence)
                    self._ended(sequence, Cancelled())

    def stop(self, timeout: float | None = None) -> bool:
        """Generate for what is queued and running, then end; return whether that took less than `timeout` seconds."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._wait():
                self._run_batch()
        except Exception as error:
            self.error = error
            self.gave_up()
        finally:  # nobody may wait for a thread that has ended, however it did
            self.fail("the server generates no more")

    def _run_batch(self) -> None:
        """Generate until the server stops, or until an error of the batch as a whole, such as of memory."""
        try:
            with closing(self._engine.generate_batch(self._requests(), self._parallel)) as events:
                for sequence, event in events:
                    assert isinstance(sequence, ServedSequence)
                    self._observe(sequence, event)
        except Exception as error:
            self._fail_all(error)
            self._failed(error)

    def _wait(self) -> bool:
        """Wait while nothing waits or runs; return whether there is more to do before the server stops."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self.running or self._is_stopping)
            return bool(self.waiting or self.running)

    def _requests(self) -> Iterator[BatchRequest | None]:
        """Yield what is to join the batch, None while there is nothing; wait where nothing runs either."""
        while self._wait():
            with self._changed:
                sequence = self.waiting.popleft() if self.waiting else None
                if sequence is not None:
                    self.running.add(sequence)
            yield None if sequence is None else sequence.request()

    def _observe(self, sequence: ServedSequence, event: BatchEvent) -> None:
        if isinstance(event, Failed) and isinstance(event.error, InternalError):
            self._failed(event.error)
        is_last = isinstance(event, Finished | Failed | Cancelled)
        if is_last:
            with self._changed:
                self.running.remove(sequence)  # before its client has the end, and may ask again
        sequence.observe(event)
        if is_last:
            self._ended(sequence, event)

    def _fail_all(self, error: Exception) -> None:
        """End what runs; if nothing does, the batch could not even begin: what waits, or the next would fail alike."""
        with self._changed:
            left = list(self.running or self.waiting)
            self.running.clear()
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in left)
        for sequence in left:
            sequence.fail(error)
            self._ended(sequence, Failed(typed_error(error)))
