"""Variable tracking: a chain of assignments, and which variables have its value (RULER, arXiv 2404.06654)."""

from random import Random
from string import ascii_uppercase

from .task import Planted, Task
from .words import numbers

_HOPS = 4


def plant(draw: Random, depth: float) -> Planted:
    """Return a chain that begins at a depth, its steps evenly behind it in order, and another chain beside it."""
    names: list[str] = []
    while len(names) < 2 * (_HOPS + 1):
        name = "".join(draw.choices(ascii_uppercase, k=5))
        names += [name] if name not in names else []
    values = numbers(draw, 2)
    chains = names[: _HOPS + 1], names[_HOPS + 1 :]
    pieces = []
    for value, chain in zip(values, chains, strict=True):
        for index, (name, before) in enumerate(zip(chain, [value, *(f"VAR {each}" for each in chain)], strict=False)):
            pieces.append((depth + (1 - depth) * index / len(chain), f"VAR {name} = {before}."))
    question = f"Which variables have the value {values[0]}?"
    return Planted(pieces, question, f"Five variables have the value {values[0]}: VAR", tuple(chains[0]))


TRACKING = Task("tracking", "variables assigned from each other, in four steps", plant)
