"""How many sequences fit into memory together. Imports no torch."""

from bisect import bisect_left
from dataclasses import replace

from ..architecture.kv_formats import BLOCK
from .inputs import PlanInputs
from .memory import estimate

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
