"""Common words of a long list, where others are rarer (RULER's CWE, arXiv 2404.06654)."""

from random import Random

from .task import Planted, Task
from .words import ADJECTIVES, NOUNS

_COMMON, _TIMES = 5, 5  # words that are common, and how many times as often as the others


def plant(draw: Random, depth: float) -> Planted:
    """Return lists of words of any length, five of which occur five times as often as each of the others."""
    words = draw.sample([*ADJECTIVES, *NOUNS], len(ADJECTIVES) + len(NOUNS))
    common, others = words[:_COMMON], words[_COMMON:]
    seed = draw.random()

    def units(count: int) -> list[str]:
        cycle = [*common * _TIMES, *others]
        found = [cycle[index % len(cycle)] for index in range(count)]
        Random(seed).shuffle(found)
        return [f"{index}. {word}" for index, word in enumerate(found, 1)]

    question = "What are the five most common words in the list above?"
    return Planted([], question, "The five most common words are:", tuple(common), units)


COMMON_WORDS = Task("common-words", "the five most common words of a list", plant, has_depth=False)
