"""The most frequent words of a text of invented ones, whose frequencies fall as in language (RULER's FWE)."""

from random import Random
from string import ascii_lowercase

from .task import Planted, Task

_WORDS, _ASKED, _EXPONENT = 50, 3, 2.0  # the k-th word is k^-2 times as frequent as the first


def plant(draw: Random, depth: float) -> Planted:
    """Return texts of any length of invented words; the three most frequent ones are asked for."""
    words = ["".join(draw.choices(ascii_lowercase, k=6)) for _ in range(_WORDS)]
    weights = [rank**-_EXPONENT for rank in range(1, _WORDS + 1)]
    seed = draw.random()

    def units(count: int) -> list[str]:
        return Random(seed).choices(words, weights, k=count)

    question = "What are the three most frequent words in the text above?"
    return Planted([], question, "The three most frequent words are:", tuple(words[:_ASKED]), units)


FREQUENT_WORDS = Task("frequent-words", "the three most frequent of invented words", plant, has_depth=False)
