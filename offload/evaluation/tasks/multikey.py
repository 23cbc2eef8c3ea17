"""A needle among others like it: numbers of several keys, one of which is asked for (RULER, arXiv 2404.06654)."""

from random import Random

from .task import Planted, Task
from .words import keys, numbers

_OTHERS = 7


def plant(draw: Random, depth: float) -> Planted:
    """Return a key's number at a depth, and those of other keys evenly around it."""
    names, values = keys(draw, _OTHERS + 1), numbers(draw, _OTHERS + 1)
    depths = [(depth + index / len(names)) % 1 for index in range(len(names))]
    said = [f"The magic number of the {name} is {value}." for name, value in zip(names, values, strict=True)]
    asked = f"the magic number of the {names[0]}"
    pieces = list(zip(depths, said, strict=True))
    return Planted(pieces, f"What is {asked}?", f"T{asked[1:]} is", (values[0],))


MULTIKEY = Task("multikey", "one needle among seven like it", plant)
