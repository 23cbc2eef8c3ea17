"""Threads that a process does not wait for at its end, unlike those of concurrent.futures: a signal can leave them."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_POLL = 0.1  # seconds


def interruptible(call: Callable[[], T]) -> T:
    """Return what a call returns, or raise what it raises; it must release the interpreter's lock while it takes long.

    After an exception from a signal's handler, the call goes on in its thread, and its result is dropped: it must be
    safe to leave alone, until the process ends too. In other threads, which no signal reaches, it is called directly.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future: Future[T] = Future()
    threading.Thread(target=_deliver, args=(future, call), daemon=True).start()
    while not future.done():
        wait((future,), _POLL)
    return future.result()


def _deliver(future: Future[Any], work: Callable[..., Any], *arguments: Any) -> None:
    """Call `work`, and give the future what it returns or raises."""
    try:
        future.set_result(work(*arguments))
    except BaseException as error:
        future.set_exception(error)


class DaemonThreads:
    """Threads that work on what is submitted, in order; a process ends without those that hang."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name, self._started = count, name, 0
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._pending = 0
        self._changed = threading.Condition()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `work` in one of the threads; return its future result."""
        future: Future[Any] = Future()
        with self._changed:
            self._pending += 1
            if self._started < min(self._count, self._pending):
                self._started += 1
                threading.Thread(target=self._run, daemon=True, name=f"triforce-{self._name}").start()
        self._queue.put((future, work, arguments))
        return future

    def wait(self, timeout: float) -> int:
        """Wait until all is done, for `timeout` seconds at most; return how much is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending, timeout)
            return self._pending

    def _run(self) -> None:
        while True:
            future, work, arguments = self._queue.get()
            if future.set_running_or_notify_cancel():
                _deliver(future, work, *arguments)
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
