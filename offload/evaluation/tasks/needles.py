"""Needles: facts that are said once somewhere in a text, alone, beside others like them, or several that are asked for.

The single one is that of Mohtashami and Jaggi (arXiv 2305.16300), in words that the text itself continues: models of
135M parameters find that at 8K tokens. The others are RULER's (arXiv 2404.06654).
"""

from random import Random

from .task import Planted, Task, around
from .words import keys, number, numbers

_OTHERS, _COUNT = 7, 4


def single(draw: Random, depth: float) -> Planted:
    """Return a pass key, said at a depth."""
    key = number(draw)
    piece = f"The pass key is {key}. Remember it. The pass key is {key}."
    return Planted([(depth, piece)], "What is the pass key?", "The pass key is", (key,))


def multikey(draw: Random, depth: float) -> Planted:
    """Return a key's number at a depth, and those of other keys evenly around it."""
    names, values = keys(draw, _OTHERS + 1), numbers(draw, _OTHERS + 1)
    asked = f"the magic number of the {names[0]}"
    return Planted(around(depth, _said(names, values)), f"What is {asked}?", f"T{asked[1:]} is", (values[0],))


def multivalue(draw: Random, depth: float) -> Planted:
    """Return a key's numbers: the first at a depth, the others evenly around the text."""
    (name,), values = keys(draw, 1), numbers(draw, _COUNT)
    pieces = around(depth, [f"One magic number of the {name} is {value}." for value in values])
    question = f"What are all four magic numbers of the {name}?"
    return Planted(pieces, question, f"The four magic numbers of the {name} are", tuple(values))


def multiquery(draw: Random, depth: float) -> Planted:
    """Return the numbers of several keys: the first at a depth, the others evenly around the text."""
    names, values = keys(draw, _COUNT), numbers(draw, _COUNT)
    asked = ", ".join(f"the {name}" for name in names[:-1]) + f" and the {names[-1]}"
    question = f"What are the magic numbers of {asked}?"
    return Planted(around(depth, _said(names, values)), question, "The magic numbers are", tuple(values))


def _said(names: list[str], values: list[str]) -> list[str]:
    return [f"The magic number of the {name} is {value}." for name, value in zip(names, values, strict=True)]


SINGLE = Task("single", "one needle: a pass key", single)
MULTIKEY = Task("multikey", "one needle among seven like it", multikey)
MULTIVALUE = Task("multivalue", "four needles of one key", multivalue)
MULTIQUERY = Task("multiquery", "four needles of four keys", multiquery)
NEEDLES = (SINGLE, MULTIKEY, MULTIVALUE, MULTIQUERY)
