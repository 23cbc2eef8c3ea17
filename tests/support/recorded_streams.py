"""What a fake GPU is asked to order: streams, events and threads that append to a recording.

Whatever is launched runs at once. The recording says on which stream it would have run, which bytes it read and wrote,
and which waits were asked for; tests/support/vector_clocks.py reads it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

from torch import Tensor

from tests.support.vector_clocks import Access, Free, Join, Record, Site, Step, Wait

HOST, COMPUTE = "host", "compute"
_COPY_STREAMS = ("to device", "to host")  # in the order in which CudaLink makes them


def site(what: str) -> Site:
    """Return the place under way: the functions of tiers that led here, the innermost first."""
    calls, lines, frame = [], [], sys._getframe(1)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        is_of_tiers = "/offload/memory/" in file or "/offload/weight_offloading/" in file
        if is_of_tiers and not name.startswith("<"):
            owner = frame.f_locals.get("self")
            calls.append(f"{type(owner).__name__}.{name}" if owner is not None else name)
            lines.append(frame.f_lineno)
        frame = frame.f_back
    return Site(what, " < ".join(calls), tuple(lines))


class Recording:
    """The steps so far, the current stream and thread, and which memory is the device's."""

    def __init__(self, done: bool) -> None:
        """With `done`, all that was launched has ended whenever the host asks (`query`); without, nothing has."""
        self.trace: list[Step] = []
        self.thread, self.done = HOST, done
        self.compute = Stream(self, COMPUTE)
        self.stream = self.compute
        self._streams = [self.compute]
        self._memories: dict[int, tuple[int, bool]] = {}  # number and whether it is the device's, by storage
        self._count = self._events = 0
        self.making = False  # a tensor of the device
        self.pinned: set[int] = set()  # by torch, which keeps freed memory until copies from and to it have ended

    def new_stream(self, device: object = None) -> Stream:
        at = len(self._streams) - 1
        name = _COPY_STREAMS[at] if at < len(_COPY_STREAMS) else f"stream {at}"
        self._streams.append(Stream(self, name))
        return self._streams[-1]

    def next_event(self) -> int:
        self._events += 1
        return self._events

    def synchronize(self, device: object = None) -> None:
        for stream in self._streams:
            stream.synchronize()

    def is_on_device(self, x: Tensor) -> bool:
        return self._memories.get(x.untyped_storage()._cdata, (0, False))[1]

    def memory_of(self, x: Tensor, stream: str | None = None) -> int:
        """Return the number of a tensor's memory, which `stream` has allocated on the device, or else the host."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            self._count += 1
            self._memories[key] = self._count, stream is not None
            weakref.finalize(storage, self._free, key, stream)
        return self._memories[key][0]

    def _free(self, key: int, stream: str | None) -> None:
        number, _ = self._memories.pop(key)
        if number not in self.pinned:
            self.trace.append(Free(number, stream or self.thread, self.thread))

    def access(self, actor: str, x: Tensor, write: bool, what: str) -> None:
        first = x.storage_offset()
        last = first + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if x.numel():
            memory, size = self.memory_of(x), x.itemsize
            self.trace.append(Access(actor, self.thread, memory, first * size, last * size, write, what))

    def block(self, name: str) -> None:
        """Record that this thread waits for the current stream: it must for most results, and for a copy it may not."""
        here = site("a copy that blocks") if name == "copy_" else None
        self.trace.append(Join(self.thread, self.thread, self.stream.name, here))


class Stream:
    def __init__(self, recording: Recording, name: str) -> None:
        self._recording, self.name = recording, name
        self.passed = 0  # events up to this number are known to have ended

    def wait_event(self, event: Event) -> None:
        to = self._recording
        to.trace.append(Wait(self.name, to.thread, event.number, site(f"{self.name} waits for {event.stream}")))

    def wait_stream(self, other: Stream) -> None:
        to = self._recording
        to.trace.append(Join(self.name, to.thread, other.name, site(f"{self.name} waits for {other.name}")))

    def synchronize(self) -> None:
        to = self._recording
        to.trace.append(Join(to.thread, to.thread, self.name, site(f"host waits for all of {self.name}")))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._recording)
        event.record(self)
        return event


class Event:
    def __init__(self, recording: Recording) -> None:
        self._recording, self.number, self.stream = recording, 0, "nothing"
        self._on: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        to, self._on = self._recording, stream or self._recording.stream
        self.number, self.stream = to.next_event(), self._on.name
        to.trace.append(Record(self.number, self.stream, to.thread))

    def synchronize(self) -> None:
        to = self._recording
        to.trace.append(Wait(to.thread, to.thread, self.number, site(f"{to.thread} waits for {self.stream}")))
        if self._on is not None:
            self._on.passed = max(self._on.passed, self.number)

    def query(self) -> bool:
        to = self._recording
        if to.done:
            to.trace.append(Wait(to.thread, to.thread, self.number))
        return to.done or self._on is None or self.number <= self._on.passed

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Ran:
    """A future whose work is done, though the thread that waits for it knows so only after `result`."""

    def __init__(self, to: Recording, thread: str, run: Callable[[], object]) -> None:
        self._to, self._thread = to, thread
        caller, to.thread = to.thread, thread
        to.trace.append(Join(thread, thread, caller))
        try:
            self._value = run()
        finally:
            to.thread = caller

    def result(self, timeout: float | None = None) -> object:
        to = self._to
        to.trace.append(Join(to.thread, to.thread, self._thread))
        return self._value
