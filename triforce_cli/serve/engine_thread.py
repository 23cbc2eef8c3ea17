"""The thread that generates: a bounded queue of sequences in, their events out, to the event loop that asked."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import InternalError, typed_error
from offload.events import Finished

from .api_errors import ApiError, unavailable
from .ranks import IDLE_S, Leader
from .sequences import ServedSequence

_SLOWEST, _FIRST_GUESS = 60, 2.0  # seconds: the longest Retry-After, and a sequence before any has ended
_WEIGHT = 0.2  # of the latest sequence in the moving average of their seconds


class EngineThread:
    """Runs `Engine.generate_batch` for as long as the server lives. While there is nothing to do the thread sleeps.

    The batch stays open meanwhile: the next question about a document finds the pages of the last one.
    `ended` is called with each sequence that has ended and its last event, `failed` with an error that clients
    are not told. Other ranks follow the `leader`: an error of a batch as a whole, which would leave them behind, ends
    the thread, and is its `error`; then `gave_up` is called.
    """

    def __init__(
        self,
        engine: Engine,
        parallel: int,
        most_waiting: int,
        ended: Callable[[ServedSequence, BatchEvent], None] = lambda sequence, event: None,
        failed: Callable[[Exception], None] = lambda error: None,
        leader: Leader | None = None,
    ) -> None:
        self._engine, self._parallel, self._most_waiting = engine, parallel, most_waiting
        self._ended, self._failed, self._leader = ended, failed, leader
        self.error: Exception | None = None
        self.gave_up: Callable[[], None] = lambda: None
        self._changed = threading.Condition()  # its lock may be taken again by the thread that has it
        self._waiting: deque[ServedSequence] = deque()
        self._running: dict[int, ServedSequence] = {}
        self._reserved = 0  # places of requests whose prompts are being encoded
        self._refusal: str | None = None  # why nothing is taken any more
        self._keys = itertools.count()
        self._stopping = False
        self._seconds = _FIRST_GUESS  # of a sequence, a moving average
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        """Whether it generates: False before it is started and after it has stopped."""
        return self._thread.is_alive()

    def is_ready(self) -> bool:
        """Return whether it would take a sequence now: it generates, does not end, and its queue has room."""
        with self._changed, suppress(ApiError):
            self._check(1)
            return self.is_alive
        return False

    def start(self) -> None:
        """Begin to generate."""
        self._thread.start()

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Hold places for the sequences of a request while its prompt is encoded. Raises ApiError as `submit`.

        Until the prompts that are being encoded count, any number of them could be held in memory.
        """
        with self._changed:
            self._check(count)
            self._reserved += count
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= count

    def submit(self, sequences: Sequence[ServedSequence]) -> None:
        """Queue all sequences of a request. Raises ApiError, and queues none, if there are too many with them."""
        with self._changed:
            self._check(len(sequences))
            self._waiting.extend(sequences)
            self._changed.notify()

    def _check(self, count: int) -> None:
        """Raise ApiError if further sequences may not be queued now."""
        if self._refusal is not None:
            raise unavailable(self._refusal)
        most = self._most_waiting + self._parallel
        if count > most:
            raise ApiError(400, f"the request has {count} sequences, and the server takes {most} at a time", param="n")
        free = max(self._parallel - len(self._running), 0)
        if len(self._waiting) + self._reserved + count > self._most_waiting + free:
            headers = {"retry-after": str(self._retry_after())}
            raise ApiError(429, "too many requests wait", "queue_full", type="overloaded", headers=headers)

    def fail(self, message: str) -> None:
        """End all sequences with status 503 and a message, and refuse further ones: what waits at once."""
        error = unavailable(message)
        with self._changed:
            self._refusal = message
            left = [*self._waiting, *list(self._running.values())]  # a copy: the thread takes out what has ended
            for sequence in left:
                sequence.fail(error)
            self.cancel(left)

    def cancel(self, sequences: Sequence[ServedSequence]) -> None:
        """End sequences: those that wait at once, those that run before the next pass."""
        with self._changed:
            for sequence in sequences:
                sequence.is_cancelled = True
                if sequence in self._waiting:
                    self._waiting.remove(sequence)
                    self._ended(sequence, Cancelled())

    def stop(self, timeout: float | None = None) -> bool:
        """Generate for what is queued and running, then end; return whether that took less than `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _retry_after(self) -> int:
        """Return the seconds after which about one of the waiting sequences has left the queue."""
        return max(1, min(round(self._seconds / self._parallel), _SLOWEST))

    def _run(self) -> None:
        try:
            self._generate()
            if self._leader is not None:
                self._leader.stop()
        except Exception as error:
            if self._leader is None:
                raise
            self.error = error
            self.gave_up()
        finally:  # nobody may wait for a thread that has ended, however it did
            self.fail("the server generates no more")

    def _generate(self) -> None:
        while self._wait_for_work():
            if self._leader is not None:
                self._leader.begin()
            try:
                events = self._engine.generate_batch(self._requests(), self._parallel)
                with closing(events):
                    for key, event in events:
                        self._observe(key, event)
            except Exception as error:  # of the batch as a whole: memory, or a defect; the next one has a new batch
                if self._leader is not None:
                    self._fail_all(error)
                    raise
                try:
                    self._failed(error)
                finally:
                    self._fail_all(error)

    def _wait_for_work(self) -> bool:
        """Wait for a sequence; return False if there is none and it is time to stop."""
        with self._changed:
            self._wait_for(lambda: self._waiting or self._stopping)
            return bool(self._waiting)

    def _wait_for(self, condition: Callable[[], object]) -> None:
        while not self._changed.wait_for(condition, None if self._leader is None else IDLE_S):
            if self._leader is not None:
                self._leader.idle()

    def _requests(self) -> Iterator[BatchRequest | None]:
        """Yield what is to join the batch, None while there is nothing; wait where nothing runs either."""
        while True:
            with self._changed:
                self._wait_for(lambda: self._waiting or self._running or self._stopping)
                if not self._waiting and not self._running:
                    break
                request = self._next() if self._waiting else None
            yield request
        if self._leader is not None:
            self._leader.end()

    def _next(self) -> BatchRequest:
        sequence, key = self._waiting.popleft(), next(self._keys)
        self._running[key] = sequence
        sequence.begun = time.monotonic()
        request = sequence.request(key)
        return request if self._leader is None else self._leader.add(sequence, request)

    def _observe(self, key: int, event: BatchEvent) -> None:
        sequence = self._running[key]
        if isinstance(event, Failed) and isinstance(event.error, InternalError):
            self._failed(event.error)
        if is_last := isinstance(event, Finished | Failed | Cancelled):
            del self._running[key]  # before its client has the end, and may ask again
        sequence.observe(event)
        if isinstance(event, Finished):
            self._seconds += _WEIGHT * (time.monotonic() - sequence.begun - self._seconds)
        if is_last:
            self._ended(sequence, event)

    def _fail_all(self, error: Exception) -> None:
        """End what runs; if nothing does, the batch could not even begin: what waits, or the next would fail alike."""
        with self._changed:
            for _ in range(0 if self._running else len(self._waiting)):
                self._running[next(self._keys)] = self._waiting.popleft()
        while self._running:
            sequence = self._running.pop(next(iter(self._running)))
            sequence.fail(error)
            self._ended(sequence, Failed(typed_error(error)))
