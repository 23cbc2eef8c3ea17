"""A lane: one sequence of a batch, whose code runs until it needs the model, and goes on when the batch has run it.

That code is the same as that of a sequence by itself: it calls its runner and gets rows back. A greenlet suspends it
inside the call, however deep in levels and drafters that is: without threads, at points that are always the same.
Greenlet is imported where a lane starts: an engine that runs no batch does not need it.
"""

import time
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..events import Event
from ..model.decoder import Model
from ..speculation.passes.steps import Step
from .request import Events, never


class LogitsRequest(NamedTuple):
    """A request for the logits of hidden rows `[tokens, hidden]`."""

    model: Model
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Pause:
    """A request to go on after the next pass, whatever that is."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a lane's events."""


Request = Step | LogitsRequest | Pause
Answer = Tensor | int | Exception | None
Start = Callable[["Lane"], Events]


class Lane:
    """One sequence of a batch. For its session it runs all passes, and is the clock.

    The clock counts the lane's own time: its own computations, and of each pass its share. What a method learns of its
    speed is then what it costs the batch.
    """

    def __init__(self, key: Hashable, start: Start, is_cancelled: Callable[[], bool] = never) -> None:
        """`start` returns the lane's events; the `key` names it. `is_cancelled` returns whether it is to be closed."""
        self.key = key
        self.is_cancelled = is_cancelled
        self.wants: Request | None = None
        self.passes_s = 0.0  # its share of the passes so far
        self._own_s = 0.0
        self._resumed_at: float | None = None
        import greenlet

        self._start = start
        self._greenlets = greenlet
        self._greenlet = greenlet.greenlet(self._follow)

    def resume(self, answer: Answer = None) -> Request | Event | Ended:
        """Answer what the lane wanted last, and run it until it wants something else, which is returned.

        The answer to a Step are its hidden rows, to an event what `send` takes; an exception is raised where the lane
        waits. Raises what the lane's code raises.
        """
        self.wants = None
        self._greenlet.parent = self._greenlets.getcurrent()
        self._resumed_at = time.perf_counter()
        try:
            # On, from one resumption to the next: the lanes' own blocks of this mode are left in another order.
            with torch.inference_mode():
                go_on = self._greenlet.throw if isinstance(answer, Exception) else self._greenlet.switch
                wanted = go_on(answer)
        finally:
            self._own_s += time.perf_counter() - self._resumed_at
            self._resumed_at = None
        if isinstance(wanted, Request):
            self.wants = wanted
        return wanted

    def close(self) -> None:
        """Close the lane's events, wherever they are."""
        if not self._greenlet:  # it has not started, or has ended
            return
        self._greenlet.parent = self._greenlets.getcurrent()
        with torch.inference_mode():
            self._greenlet.throw(self._greenlets.GreenletExit)

    def clock(self) -> float:
        """Return the seconds that the lane has taken so far."""
        running = 0.0 if self._resumed_at is None else time.perf_counter() - self._resumed_at
        return self.passes_s + self._own_s + running

    def forward(self, step: Step) -> Tensor:
        """Run a step with those of other lanes; return its hidden rows `[tokens, hidden]`."""
        return self._ask(step)

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """Return the logits `[tokens, vocab]` of hidden rows, computed with those of other lanes."""
        return self._ask(LogitsRequest(model, hidden))

    def pause(self) -> None:
        """Let the other lanes run one pass."""
        self._ask(Pause())

    def _ask(self, wanted: Request | Event) -> Answer:
        return self._greenlet.parent.switch(wanted)

    def _follow(self, answer: Answer) -> Ended:
        """Run in the greenlet: pass on the events and their answers."""
        with closing(self._start(self)) as events:
            while True:
                try:
                    event = events.send(answer)
                except StopIteration:
                    return Ended()
                answer = self._ask(event)
