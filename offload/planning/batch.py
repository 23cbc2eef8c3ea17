"""Batches: how many sequences fit together, and what decoding them together brings. Imports no torch.

A pass over a batch reads the weights once, and the keys and values of every sequence. So a batch gains while weights
are most of what a pass reads; a long context, or the rows of many verifications, leave less to gain.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..architecture.kv_formats import BLOCK
from .inputs import PlanInputs
from .memory import estimate
from .placement import device_limit, place
from .plan import Plan, make_plan

MOST_SEQUENCES = 2**16  # the search for how many fit ends here


def fitting_sequences(inputs: PlanInputs, free: int) -> int:
    """Return how many sequences fit into `free` bytes together, at most MOST_SEQUENCES; 0: not even one fits.

    `inputs.shared` tokens of their beginning are the same, and in memory once.
    """
    counts = range(1, MOST_SEQUENCES + 1)
    return bisect_left(counts, True, key=lambda count: estimate(replace(inputs, sequences=count)).total > free)


def kv_room(inputs: PlanInputs, free: int, count: int, spare: int = 0) -> int:
    """Return how many of `free` bytes the keys and values of `count` sequences may take together.

    That is what all else leaves, with `spare` sequences that have memory of their own, and room for one sequence in any
    case, in whole pages.
    """
    one, own, all_together = (estimate(replace(inputs, sequences=n)) for n in (1, count, count + spare))
    beside, kv = all_together.total - own.parts["KV cache"], one.parts["KV cache"]
    return max(free - beside, kv + BLOCK * kv // inputs.tokens)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A plan for several sequences `together`, and the one for a sequence `alone`: valid only if both fit.

    In `together`, the time between tokens is the time of one sequence.
    """

    alone: Plan
    together: Plan

    @property
    def sequences(self) -> int:
        return self.together.inputs.sequences

    @property
    def fits(self) -> bool:
        return self.together.fits

    @property
    def plain_tokens_per_s(self) -> float:
        """Return the tokens a second of all sequences together, decoded plainly."""
        return self.sequences / self.together.plain.tbt.seconds

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second of all sequences together, by the method that is chosen for the batch."""
        return self.sequences / self.together.chosen.tbt.seconds

    @property
    def plain_gain(self) -> float:
        """Return the throughput relative to sequences one after the other, all decoded plainly."""
        return self.plain_tokens_per_s * self.alone.plain.tbt.seconds

    @property
    def gain(self) -> float:
        """Return the throughput relative to sequences one after the other, each by the method chosen for it alone."""
        return self.tokens_per_s * self.alone.chosen.tbt.seconds

    @property
    def speedup(self) -> float:
        """Return the throughput relative to plain decoding of the same batch."""
        return self.together.speedup


@dataclass(frozen=True, slots=True)
class Batches:
    """Plans for batches of several sizes with a common beginning of `shared` tokens, and how many sequences fit.

    `fitting` is None where the memory is not known.
    """

    plans: tuple[BatchPlan, ...]
    fitting: int | None
    shared: int = 0


def plan_batches(alone: Plan, sizes: Iterable[int], shared: int = 0) -> Batches:
    """Return plans for as many sequences together as each of the sizes says, beside the plan of one that fits."""
    inputs = replace(alone.inputs, shared=shared)
    plans = tuple(BatchPlan(alone, make_plan(replace(inputs, sequences=size))) for size in sizes)
    return Batches(plans, most_sequences(inputs), shared)


def most_sequences(inputs: PlanInputs) -> int | None:
    """Return how many sequences fit without moving the weights or the KV cache of a single one off the device.

    Where not all is, sequences are added until the other memories are full. At most MOST_SEQUENCES; None where the
    memory is not known, and taken as enough.
    """
    if device_limit(inputs) is None:
        return None
    alone = place(replace(inputs, sequences=1))
    resident = alone.resident_layers if alone.resident_layers == inputs.shape.kv_layers else 0

    def is_too_many(count: int) -> bool:
        placed = place(replace(inputs, sequences=count))
        moves = placed.weight_layers < alone.weight_layers or placed.resident_layers < resident
        moves = moves or (placed.away_layers > 0 and not alone.away_layers)
        return moves or not placed.fits

    return bisect_left(range(1, MOST_SEQUENCES + 1), True, key=is_too_many)
