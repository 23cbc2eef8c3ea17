"""Threads that a process does not wait for at its end, unlike those of concurrent.futures."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


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
                try:
                    future.set_result(work(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
