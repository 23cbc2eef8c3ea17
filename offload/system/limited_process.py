"""Runs code on input that is not trusted, in child processes with limits of memory and time.

A child lives for as many calls as it is given, and ends with its parent. A call that exceeds a limit ends its child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import IO

from ..units import size_text

_REQUEST = Struct("<QQd")  # bytes that follow, bytes of memory, seconds
_ANSWER = Struct("<BQ")  # one of the statuses, bytes that follow
_DONE, _REFUSED, _NO_MEMORY = range(3)
_PATIENCE = 10  # a busy machine gives a process less than this fraction of a processor
_PROCESSES = 4  # at once, of one kind
_WATCH = 0.5  # seconds between two looks at whether the parent lives

Handler = Callable[[bytes], bytes]


class LimitExceeded(Exception):
    """The work needs more than its limits. The message is one line, without a subject: "takes more than 2 s …"."""


class Refused(Exception):
    """Raised by a handler, and then by `call`, for input that is wrong in itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one call may take: bytes of memory beyond what the program itself has, seconds of a processor."""

    memory: int
    seconds: float


class LimitedProcesses:
    """Child processes that each have imported a handler, started when they are needed. Any thread may call.

    Args:
        handler: "module:function", which takes and returns bytes, and raises Refused for wrong input.
    """

    def __init__(self, handler: str) -> None:
        self._handler = handler
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._closed, self._lock = False, threading.Lock()
        self._free = threading.BoundedSemaphore(_PROCESSES)
        weakref.finalize(self, _end_all, self._idle)  # also when the interpreter exits

    def call(self, data: bytes, limits: Limits) -> bytes:
        """Return the handler's answer. Raises its Refused, and LimitExceeded; any other error ends the child too."""
        with self._free:
            child = self._taken()
            try:
                status, answer = child.call(data, limits)
            except BaseException:  # Ctrl-C as well
                child.end()
                raise
            finally:
                with self._lock:
                    self._busy.remove(child)
            if status == _NO_MEMORY:  # what is left in it is unknown
                child.end()
                raise LimitExceeded(_too_much_memory(limits))
            self._idle.append(child)
        if status == _REFUSED:
            raise Refused(answer.decode("utf-8", "surrogatepass"))
        return answer

    def _taken(self) -> _Child:
        """Return a process for a call. Raises LimitExceeded after `end`."""
        with self._lock:  # so that `end` misses none
            if self._closed:
                raise LimitExceeded("is no longer wanted")
            try:
                while (child := self._idle.pop()).has_ended():  # a system without memory may have killed it
                    child.end()
            except IndexError:
                child = _Child(self._handler)
            self._busy.add(child)
            return child

    def end(self) -> None:
        """End all processes, at work or not, for good: calls under way and later ones raise LimitExceeded."""
        with self._lock:
            self._closed = True
            for child in self._busy:
                child.kill()
        self.close_idle()

    def close_idle(self) -> None:
        """End the processes that wait for a call; the next call starts one again."""
        _end_all(self._idle)


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


class _Child:
    """A process with the same import path as this one; its messages go nowhere."""

    def __init__(self, handler: str) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({handler!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the parent alone, which ends it
        )

    def call(self, data: bytes, limits: Limits) -> tuple[int, bytes]:
        """Return the status and the answer. Raises LimitExceeded."""
        expired = threading.Event()
        timer = threading.Timer(limits.seconds * _PATIENCE, self._expire, (expired,))
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(_REQUEST.pack(len(data), limits.memory, limits.seconds))
            self._process.stdin.write(data)
            self._process.stdin.flush()
            status, length = _ANSWER.unpack(_read(self._process.stdout, _ANSWER.size))
            return status, _read(self._process.stdout, length)
        except (BrokenPipeError, EOFError):
            raise LimitExceeded(self._reason(limits, expired.is_set())) from None
        finally:
            timer.cancel()

    def _expire(self, expired: threading.Event) -> None:
        expired.set()
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL: who waits for its answer then sees its end."""
        self._process.kill()

    def _reason(self, limits: Limits, expired: bool) -> str:
        """Return why the process has ended."""
        code = self._process.wait()
        name = signal.Signals(-code).name if code < 0 else ""
        if expired or name == "SIGPROF":
            return f"takes more than {limits.seconds:.3g} s of processor time, the most that it may"
        if name in ("SIGABRT", "SIGKILL"):  # what allocators and the system do without memory
            return _too_much_memory(limits)
        return f"makes its process end with {name or f'code {code}'}"

    def has_ended(self) -> bool:
        """Return whether the process runs no more."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End the process at once, and wait for its end."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            try:
                stream.close()
            except OSError:  # what was not yet written cannot be
                pass
        self._process.wait()


def _too_much_memory(limits: Limits) -> str:
    return f"takes more than {size_text(limits.memory)} of memory, the most that it may"


def _read(stream: IO[bytes], length: int) -> bytes:
    """Return exactly so many bytes. Raises EOFError."""
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def serve(name: str) -> None:
    """Answer the calls of the parent process until it ends: the main function of a child."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # libraries must not read the calls, nor print into the answers
        os.dup2(nowhere, standard)
    module, _, function = name.partition(":")
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    handler = getattr(__import__(module, fromlist=[function]), function)
    while header := source.read(_REQUEST.size):
        length, memory, seconds = _REQUEST.unpack(header)
        _limit(memory, seconds)
        status, answer = _handled(handler, source, length)
        _limit_time(0)  # watching the parent would use up the seconds in some days without a call
        sink.write(_ANSWER.pack(status, len(answer)))
        sink.write(answer)
        sink.flush()
        del answer


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has been killed, instead of at the end of a long call."""
    while os.getppid() == parent:
        time.sleep(_WATCH)
    os._exit(1)


def _handled(handler: Handler, source: IO[bytes], length: int) -> tuple[int, bytes]:
    try:
        return _DONE, handler(_read(source, length))
    except MemoryError:
        return _NO_MEMORY, b""
    except Refused as error:
        return _REFUSED, str(error).encode("utf-8", "surrogatepass")


def _limit_time(seconds: float) -> None:
    """Let the system end this process after so many seconds of a processor; 0: never."""
    if hasattr(signal, "setitimer"):  # which Windows has not
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit(memory: int, seconds: float) -> None:
    """Let the system end this process after so many seconds of a processor, and refuse it more memory."""
    try:
        import resource
    except ImportError:  # Windows: only the parent's patience is a limit
        return
    _limit_time(seconds)
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + memory
        resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file is left of a crash
    except (OSError, ValueError):  # a system without this limit
        pass
