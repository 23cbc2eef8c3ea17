"""Several needles of one key, all of which are asked for (RULER, arXiv 2404.06654)."""

from random import Random

from .task import Planted, Task
from .words import keys, numbers

_COUNT = 4


def plant(draw: Random, depth: float) -> Planted:
    """Return a key's numbers: the first at a depth, the others evenly around the text."""
    (name,), values = keys(draw, 1), numbers(draw, _COUNT)
    pieces = [
        ((depth + index / _COUNT) % 1, f"One magic number of the {name} is {value}.")
        for index, value in enumerate(values)
    ]
    question = f"What are all four magic numbers of the {name}?"
    return Planted(pieces, question, f"The four magic numbers of the {name} are", tuple(values))


MULTIVALUE = Task("multivalue", "four needles of one key", plant)
