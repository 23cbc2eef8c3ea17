"""A batch: which sequences run, which of their steps make up the next pass, and how each of them ends."""

import time
import traceback
from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from ..errors import TriforceError, typed_error
from ..events import Event
from ..model.decoder import Model
from ..settings.method_sizes import KEPT_QUERIES
from ..speculation.passes.steps import Step
from .costs import PassCosts, shares
from .lane import Answer, Lane, LogitsRequest, Pause
from .passes import run_logits, run_steps


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a sequence that an error has ended; the others go on."""

    error: TriforceError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The last event of a sequence that its request has cancelled: its memory is free."""


BatchEvent = Event | Failed | Cancelled


class Batch:
    """Runs up to `most` sequences at a time; the next one joins when one has left.

    A pass runs one step of every sequence, but only one chunk of a prompt: whoever decodes never waits for more.
    """

    def __init__(self, most: int, in_step: bool = False) -> None:
        """`in_step` with other ranks: an exception that is no TriforceError, perhaps of this rank alone, ends all."""
        self._most, self._in_step = most, in_step
        self._lanes: list[Lane] = []
        self._read_costs: dict[Model, float] = {}
        self._costs = PassCosts()

    def run(self, sequences: Iterable[Lane | None]) -> Generator[tuple[Hashable, BatchEvent], int | None]:
        """Run all sequences; yield their events, each with its key.

        What is sent goes to the sequence whose event it answers. An exception of a sequence ends that one alone, with
        Failed; after one of a joint pass, each step of it runs by itself. None says that no sequence is ready to join:
        the iterable is asked again after the next pass, while others run. Sequences are cancelled between passes.
        """
        waiting = iter(sequences)
        try:
            while True:
                yield from self._close_cancelled()
                while len(self._lanes) < self._most and (joining := next(waiting, None)) is not None:
                    self._lanes.append(joining)
                    yield from self._drive(joining, None)
                if not self._lanes:
                    return
                for lane, answer in self._answers():
                    yield from self._drive(lane, answer)
        finally:
            with ExitStack() as closing_all:  # each, though closing another may be interrupted
                for lane in self._lanes:
                    closing_all.callback(lane.close)
                self._lanes.clear()

    def _close_cancelled(self) -> Iterator[tuple[Hashable, Cancelled | Failed]]:
        for lane in [lane for lane in self._lanes if lane.is_cancelled()]:
            self._lanes.remove(lane)
            try:
                lane.close()
            except Exception as error:
                yield lane.key, self._failed(error)
            else:
                yield lane.key, Cancelled()

    def _drive(self, lane: Lane, answer: Answer) -> Generator[tuple[Hashable, BatchEvent], int | None]:
        """Run a lane until it waits for the batch, or has ended."""
        while True:
            try:
                event = lane.resume(answer)
            except Exception as error:
                self._lanes.remove(lane)
                yield lane.key, self._failed(error)
                return
            if event is None:
                if lane.has_ended:
                    self._lanes.remove(lane)
                return
            answer = yield lane.key, event

    def _failed(self, error: Exception) -> Failed:
        """Return the last event of a sequence that has raised an exception. Raises it if it is to end all."""
        if self._in_step and not isinstance(error, TriforceError):
            raise error
        traceback.clear_frames(error.__traceback__)  # they hold the caches
        return Failed(typed_error(error))

    def _answers(self) -> list[tuple[Lane, Answer]]:
        """Run what the lanes wait for: first logits, so that their sequences can take part in the pass that follows."""
        if heads := [(lane, lane.wants) for lane in self._lanes if isinstance(lane.wants, LogitsRequest)]:
            requests = [request for _, request in heads]
            started = time.perf_counter()
            results = run_logits(requests)
            seconds = time.perf_counter() - started
            return _charged([lane for lane, _ in heads], [share * seconds for share in shares(requests)], results)
        waiting = [(lane, lane.wants) for lane in self._lanes if isinstance(lane.wants, Step)]
        short = [(lane, step) for lane, step in waiting if not _is_chunk(step)]
        if len({id(step.model) for _, step in short}) > 1:
            # Drafts of small models first, so that the passes of the large one have all sequences.
            least = min(self._read_cost(step.model) for _, step in short)
            return self._run([(lane, step) for lane, step in short if self._read_cost(step.model) == least])
        chunks = [(lane, step) for lane, step in waiting if _is_chunk(step)]
        return self._run(short + chunks[:1]) + [(lane, None) for lane in self._lanes if isinstance(lane.wants, Pause)]

    def _run(self, waiting: list[tuple[Lane, Step]]) -> list[tuple[Lane, Answer]]:
        """Run the steps that lanes wait for together; return the rows of each lane."""
        steps = [step for _, step in waiting]
        started = time.perf_counter()
        results = run_steps(steps)
        seconds = self._costs.divide(steps, time.perf_counter() - started) if steps else []
        return _charged([lane for lane, _ in waiting], seconds, results)

    def _read_cost(self, model: Model) -> float:
        """Return what a step of a model costs on rank 0: shares of ranks may be uneven, but all must choose alike."""
        if model not in self._read_costs:
            (self._read_costs[model],) = model.group.agree([model.read_cost])
        return self._read_costs[model]


def _charged(lanes: list[Lane], seconds: list[float], results: list) -> list[tuple[Lane, Answer]]:
    """Add each lane's share of a pass to its time; return the lanes with their results."""
    for lane, share in zip(lanes, seconds, strict=True):
        lane.passes_s += share
    return list(zip(lanes, results, strict=True))


def _is_chunk(step: Step) -> bool:
    """Return whether a step is a chunk of a prompt, not a draft or its verification, which may be a large tree."""
    return step.tree is None and len(step.ids) > KEPT_QUERIES
