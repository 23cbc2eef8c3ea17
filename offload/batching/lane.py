"""A lane: one sequence of a batch, whose code runs until it needs the model, and goes on when the batch has run it.

That code is the same as that of a sequence by itself: it calls its runner and gets rows back. A greenlet suspends it
inside the call, however deep in levels and drafters that is: without threads, at points that are always the same.
Greenlet is imported where a lane starts: an engine that runs no batch does not need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import closing
from typing import Any, NamedTuple

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


class Pause(NamedTuple):
    """A request to go on after the next pass, whatever that is."""


Answer = Tensor | int | Exception | None


class Lane:
    """One sequence of a batch. For its session it runs all passes, and is the clock.

    The clock counts the lane's own time: its own computations, and of each pass its share. What a method learns of its
    speed is then what it costs the batch.

    Attributes:
        key, is_cancelled: the name of the sequence, and a function that returns whether it is to be closed.
        wants: the pass or the logits that the lane waits for; None before its start and after its end.
        passes_s: its share of the passes so far, in seconds.
    """

    def __init__(self, key: Hashable, start: Callable[[Lane], Events], is_cancelled: Callable[[], bool] = never):
        """`start` returns the lane's events."""
        import greenlet

        self.key, self.is_cancelled = key, is_cancelled
        self.wants: Step | LogitsRequest | Pause | None = None
        self.passes_s = self._own_s = 0.0
        self._resumed_at: float | None = None
        self._start, self._greenlets = start, greenlet
        self._greenlet = greenlet.greenlet(self._follow)

    @property
    def has_ended(self) -> bool:
        return bool(self._greenlet.dead)

    def resume(self, answer: Answer = None) -> Event | None:
        """Answer the lane's last event or wish; run it to the next event, which is returned, or to its next wish: None.

        The answer to a Step are its hidden rows, to an event the number that `send` takes; an exception is raised where
        the lane waits. Raises what the lane's code raises.
        """
        self.wants = None
        self._greenlet.parent = self._greenlets.getcurrent()
        self._resumed_at = time.perf_counter()
        try:
            # On, from one resumption to the next: the lanes' own blocks of this mode are left in another order.
            with torch.inference_mode():
                go_on = self._greenlet.throw if isinstance(answer, Exception) else self._greenlet.switch
                event: Event | None = go_on(answer)
                return event
        finally:
            self._own_s += time.perf_counter() - self._resumed_at
            self._resumed_at = None

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
        rows: Tensor = self._wait_for(step)
        return rows

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """Return the logits `[tokens, vocab]` of hidden rows, computed with those of other lanes."""
        rows: Tensor = self._wait_for(LogitsRequest(model, hidden))
        return rows

    def pause(self) -> None:
        """Let the other lanes run one pass."""
        self._wait_for(Pause())

    def _wait_for(self, wanted: Step | LogitsRequest | Pause) -> Any:
        self.wants = wanted
        return self._greenlet.parent.switch(None)

    def _follow(self, answer: None) -> None:
        """Run in the greenlet: pass on the events and their answers."""
        with closing(self._start(self)) as events:
            while True:
                try:
                    event = events.send(answer)
                except StopIteration:
                    return
                answer = self._greenlet.parent.switch(event)
