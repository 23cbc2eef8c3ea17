"""Happens-before between streams and threads: find accesses to the same memory that nothing orders.

An actor is a stream or a host thread; its steps run in order. A kernel or a copy runs after everything that its thread
knew when it launched it. Other orders come from events and joins alone. Vector clocks: Fidge, and Mattern (both 1988).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import NamedTuple


class Site(NamedTuple):
    """A place in the code that orders something: what waits for what, and the calls that lead there."""

    what: str
    calls: str
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}: {self.calls}"


class Access(NamedTuple):
    """An actor reads or writes bytes `first` to `last` of a memory; `thread` launched it."""

    actor: str
    thread: str
    memory: int
    first: int
    last: int
    write: bool
    what: str


class Record(NamedTuple):
    """An event is recorded behind what its stream has to do."""

    event: int
    stream: str
    thread: str


class Wait(NamedTuple):
    """An actor waits for an event."""

    actor: str
    thread: str
    event: int
    site: Site | None = None


class Join(NamedTuple):
    """An actor waits for all that another has to do so far."""

    actor: str
    thread: str
    other: str
    site: Site | None = None


class Keep(NamedTuple):
    """Memory is not allocated again before what a stream has to do with it is done (`record_stream`)."""

    memory: int
    stream: str
    site: Site | None = None


class Free(NamedTuple):
    """Memory is freed: `owner`, the stream or thread that allocated it, may use it for something else at once."""

    memory: int
    owner: str
    thread: str


Step = Access | Record | Wait | Join | Keep | Free


class Race(NamedTuple):
    """Two accesses to the same memory, one a write, that nothing orders."""

    first: str
    second: str


class _Used(NamedTuple):
    time: int
    what: str


class _Checker:
    def __init__(self, without: Collection[Site]) -> None:
        self._without = without
        self._clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._events: dict[int, dict[str, int]] = {}
        self._used: dict[int, dict[Hashable, _Used]] = defaultdict(dict)  # of a memory, by extent, kind and actor
        self._kept: dict[int, set[str]] = defaultdict(set)

    def take(self, step: Step) -> Iterator[Race]:
        """Take a step; yield the races in which it is the second one."""
        if isinstance(step, Access):
            yield from self._access(step)
        elif isinstance(step, Free):
            yield from self._free(step)
        elif isinstance(step, Record):
            self._launch(step.stream, step.thread)
            self._events[step.event] = dict(self._clocks[step.stream])
        elif step.site not in self._without:
            self._order(step)

    def _order(self, step: Wait | Join | Keep) -> None:
        if isinstance(step, Keep):
            self._kept[step.memory].add(step.stream)
            return
        self._launch(step.actor, step.thread)
        other = self._events.get(step.event, {}) if isinstance(step, Wait) else self._clocks[step.other]
        self._join(step.actor, other)

    def _launch(self, actor: str, thread: str) -> None:
        if actor != thread:
            self._join(actor, self._clocks[thread])

    def _join(self, actor: str, known: dict[str, int]) -> None:
        clock = self._clocks[actor]
        for name, time in list(known.items()):
            clock[name] = max(clock[name], time)

    def _access(self, step: Access) -> Iterator[Race]:
        self._launch(step.actor, step.thread)
        clock, used = self._clocks[step.actor], self._used[step.memory]
        clock[step.actor] += 1
        for (first, last, write, actor), earlier in used.items():
            apart = last <= step.first or step.last <= first
            if not apart and (write or step.write) and clock[actor] < earlier.time:
                yield Race(f"{actor}: {earlier.what}", f"{step.actor}: {step.what}")
        used[step.first, step.last, step.write, step.actor] = _Used(clock[step.actor], step.what)

    def _free(self, step: Free) -> Iterator[Race]:
        self._launch(step.owner, step.thread)
        clock, kept = self._clocks[step.owner], self._kept.pop(step.memory, set())
        for (_, _, _, actor), earlier in self._used.pop(step.memory, {}).items():
            if actor not in kept and clock[actor] < earlier.time:
                yield Race(f"{actor}: {earlier.what}", f"{step.owner}: other use of freed memory")


def races(trace: Iterable[Step], without: Collection[Site] = ()) -> Iterator[Race]:
    """Yield the races of a trace, as if the waits of the sites `without` were missing from the code."""
    checker = _Checker(frozenset(without))
    for step in trace:
        yield from checker.take(step)


def shared_only(trace: list[Step]) -> list[Step]:
    """Leave out accesses to memory that one actor alone uses: they cannot race."""
    actors: dict[int, set[str]] = defaultdict(set)
    for step in trace:
        if isinstance(step, Access):
            actors[step.memory].add(step.actor)
        elif isinstance(step, Free):
            actors[step.memory].add(step.owner)
    return [step for step in trace if not isinstance(step, Access | Free | Keep) or len(actors[step.memory]) > 1]


def sites(trace: Iterable[Step]) -> set[Site]:
    """Return all sites of a trace."""
    return {step.site for step in trace if isinstance(step, Wait | Join | Keep) and step.site is not None}
