"""One needle: a pass key, said once somewhere in a text (Mohtashami and Jaggi, arXiv 2305.16300).

In words that the text itself continues: models of 135M parameters find that at 8K tokens.
"""

from random import Random

from .task import Planted, Task
from .words import number


def plant(draw: Random, depth: float) -> Planted:
    """Return a pass key, said at a depth."""
    key = number(draw)
    piece = f"The pass key is {key}. Remember it. The pass key is {key}."
    return Planted([(depth, piece)], "What is the pass key?", "The pass key is", (key,))


SINGLE = Task("single", "one needle: a pass key", plant)
