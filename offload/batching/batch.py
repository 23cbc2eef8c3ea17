"""A batch: which sequences run, which of their steps make up the next pass, and what each one's part of it costs."""

import time
import traceback
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..errors import TriforceError, typed_error
from ..events import Event
from ..model.decoder import Model
from ..settings.method_sizes import KEPT_QUERIES
from ..speculation.passes.estimators import ATTENTION_COST, ROW_COST
from ..speculation.passes.steps import Step
from .lane import Answer, Ended, Lane, LogitsRequest, Pause, Start
from .passes import JointPasses, Result, logits

_FORGET = 1.01  # a plain pass may take so much longer than the one before: contexts grow


class PassCosts:
    """Divides the time of passes between their sequences: who drafts pays for what drafts add.

    By rows and bytes alone, a draft would look cheap where it makes the pass of all slower, such as one of too many
    rows for a single call of the kernel. So where the time of a pass without drafts is known, what a pass with
    drafts takes longer is theirs.
    """

    def __init__(self) -> None:
        self._plain: dict[Hashable, float] = {}  # seconds of the fastest pass of one row each, by models

    def divide(self, steps: Sequence[Step], seconds: float) -> list[float]:
        """Return the seconds of each step of a pass; their sum is `seconds`."""
        models = tuple(sorted(id(step.model) for step in steps))
        extra = [len(step.ids) - 1 for step in steps]
        if not any(extra):
            self._plain[models] = min(self._plain.get(models, seconds) * _FORGET, seconds)
        plain = min(self._plain.get(models, seconds), seconds)
        if not any(extra) or models not in self._plain or max(extra) >= KEPT_QUERIES:
            return divide(steps, seconds)
        parts = zip(shares([replace(step, ids=step.ids[:1]) for step in steps]), extra, strict=True)
        return [share * plain + rows / sum(extra) * (seconds - plain) for share, rows in parts]


def divide(wanted: Sequence[Step] | Sequence[LogitsRequest], seconds: float) -> list[float]:
    """Return the seconds of each part, by what it reads and computes."""
    return [share * seconds for share in shares(wanted)]


def shares(wanted: Sequence[Step] | Sequence[LogitsRequest]) -> list[float]:
    """Return the share of the time that each part takes; their sum is 1.

    The weights are read once for all. Each part reads its own keys and values, and computes its own rows.
    """
    costs = [_own_cost(each) + each.model.read_cost / len(wanted) for each in wanted]
    return [cost / sum(costs) for cost in costs]


def _own_cost(part: Step | LogitsRequest) -> float:
    """Return what a part adds, in bytes of weights that take as long to read."""
    weights = part.model.read_cost
    if isinstance(part, LogitsRequest):
        return ROW_COST * weights * (len(part.hidden) - 1)
    kv = ATTENTION_COST * part.model.shape.growing.kv_bytes(1, part.model.dtype.itemsize) * part.keys
    experts = part.model.read_cost_of(len(part.ids)) - weights  # those that only its further rows read
    return kv + experts + ROW_COST * (weights + kv) * (len(part.ids) - 1)


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a sequence that an error has ended; the others go on."""

    error: TriforceError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The last event of a sequence that its request has cancelled: its memory is free."""


BatchEvent = Event | Failed | Cancelled
Waiting = tuple[Hashable, Start] | tuple[Hashable, Start, Callable[[], bool]]


class Batch:
    """Runs up to `most` sequences at a time; the next one joins when one has left.

    A pass runs one step of every sequence, but only one chunk of a prompt: whoever decodes never waits for more.
    """

    def __init__(self, most: int, in_step: bool = False) -> None:
        """`in_step` with other ranks: an exception that is no TriforceError, perhaps of this rank alone, ends all."""
        self._most, self._in_step = most, in_step
        self._lanes: list[Lane] = []
        self._joint = JointPasses()
        self._read_costs: dict[Model, float] = {}
        self._pass_costs = PassCosts()

    def run(self, sequences: Iterable[Waiting | None]) -> Generator[tuple[Hashable, BatchEvent], int | None]:
        """Run all sequences, each a key, what starts its events, and what says that it is cancelled; yield the events.

        What is sent goes to the sequence whose event it answers. An exception of a sequence ends that one alone, with
        Failed; after one of a joint pass, each step of it runs by itself. None says that no sequence is ready to join:
        the iterable is asked again after the next pass, while others run. Sequences are cancelled between passes.
        """
        waiting = iter(sequences)
        try:
            while True:
                yield from self._close_cancelled()
                for lane in self._admit(waiting):
                    yield from self._drive(lane, None)
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
            self._remove(lane)
            try:
                lane.close()
            except Exception as error:
                yield lane.key, self._failed(error)
            else:
                yield lane.key, Cancelled()

    def _admit(self, waiting: Iterator[Waiting | None]) -> Iterator[Lane]:
        """Yield new lanes while there are fewer than there may be."""
        while len(self._lanes) < self._most and (following := next(waiting, None)) is not None:
            lane = Lane(*following)
            self._lanes.append(lane)
            yield lane

    def _drive(self, lane: Lane, answer: Answer) -> Generator[tuple[Hashable, BatchEvent], int | None]:
        """Run a lane until it waits for the batch, or has ended."""
        while True:
            try:
                wanted = lane.resume(answer)
            except Exception as error:
                self._remove(lane)
                yield lane.key, self._failed(error)
                return
            if isinstance(wanted, Ended):
                self._remove(lane)
            if lane.wants is not None or isinstance(wanted, Ended):
                return
            answer = yield lane.key, wanted

    def _remove(self, lane: Lane) -> None:
        self._lanes.remove(lane)

    def _failed(self, error: Exception) -> Failed:
        """Return the last event of a sequence that has raised an exception. Raises it if it is to end all."""
        if self._in_step and not isinstance(error, TriforceError):
            raise error
        traceback.clear_frames(error.__traceback__)  # they hold the caches
        return Failed(typed_error(error))

    def _answers(self) -> list[tuple[Lane, Answer]]:
        """Run what the lanes wait for: first logits, so that their sequences can take part in the pass that follows."""
        if heads := [lane for lane in self._lanes if isinstance(lane.wants, LogitsRequest)]:
            return self._run(heads, logits, divide)
        waiting = [lane for lane in self._lanes if isinstance(lane.wants, Step)]
        short = [lane for lane in waiting if not _is_chunk(lane.wants)]
        chunks = [lane for lane in waiting if _is_chunk(lane.wants)]
        if len({id(lane.wants.model) for lane in short}) > 1:
            # Drafts of small models first, so that the passes of the large one have all sequences.
            costs = [self._read_cost(lane.wants.model) for lane in short]
            least = [lane for lane, cost in zip(short, costs, strict=True) if cost == min(costs)]
            return self._run(least, self._joint.run, self._pass_costs.divide)
        paused = [(lane, None) for lane in self._lanes if isinstance(lane.wants, Pause)]
        return self._run(short + chunks[:1], self._joint.run, self._pass_costs.divide) + paused

    def _read_cost(self, model: Model) -> float:
        """Return what a step of a model costs on rank 0: shares of ranks may be uneven, but all must choose alike."""
        if model not in self._read_costs:
            (self._read_costs[model],) = model.group.agree([model.read_cost])
        return self._read_costs[model]

    def _run(
        self, lanes: list[Lane], compute: Callable[[list], list[Result]], divide: Callable[[list, float], list[float]]
    ) -> list[tuple[Lane, Answer]]:
        """Compute what the lanes want together, and divide the seconds that it takes between them."""
        wanted = [lane.wants for lane in lanes]
        started = time.perf_counter()
        results = compute(wanted)
        seconds = time.perf_counter() - started
        for lane, part in zip(lanes, divide(wanted, seconds), strict=True):
            lane.passes_s += part
        return list(zip(lanes, results, strict=True))


def _is_chunk(step: Step) -> bool:
    """Return whether a step is a chunk of a prompt, not a draft or its verification, which may be a large tree."""
    return step.tree is None and len(step.ids) > KEPT_QUERIES
