"""Several needles of several keys, all of which are asked for (RULER, arXiv 2404.06654)."""

from random import Random

from .task import Planted, Task
from .words import keys, numbers

_COUNT = 4


def plant(draw: Random, depth: float) -> Planted:
    """Return the numbers of several keys: the first at a depth, the others evenly around the text."""
    names, values = keys(draw, _COUNT), numbers(draw, _COUNT)
    pieces = [
        ((depth + index / _COUNT) % 1, f"The magic number of the {name} is {value}.")
        for index, (name, value) in enumerate(zip(names, values, strict=True))
    ]
    asked = ", ".join(f"the {name}" for name in names[:-1]) + f" and the {names[-1]}"
    return Planted(pieces, f"What are the magic numbers of {asked}?", "The magic numbers are", tuple(values))


MULTIQUERY = Task("multiquery", "four needles of four keys", plant)
