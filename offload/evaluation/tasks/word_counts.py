"""Words that are frequent in a text: of a list, and of invented words (RULER's CWE and FWE, arXiv 2404.06654)."""

from random import Random
from string import ascii_lowercase

from .task import Planted, Task
from .words import ADJECTIVES, NOUNS

_COMMON, _TIMES = 5, 5  # words that are common, and how many times as often as the others
_WORDS, _ASKED, _EXPONENT = 50, 3, 2.0  # the k-th word is k^-2 times as frequent as the first, as in language


def plant_common(draw: Random, depth: float) -> Planted:
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


def plant_frequent(draw: Random, depth: float) -> Planted:
    """Return texts of any length of invented words; the three most frequent ones are asked for."""
    words = ["".join(draw.choices(ascii_lowercase, k=6)) for _ in range(_WORDS)]
    weights = [rank**-_EXPONENT for rank in range(1, _WORDS + 1)]
    seed = draw.random()

    def units(count: int) -> list[str]:
        return Random(seed).choices(words, weights, k=count)

    question = "What are the three most frequent words in the text above?"
    return Planted([], question, "The three most frequent words are:", tuple(words[:_ASKED]), units)


WORD_COUNTS = (
    Task("common-words", "the five most common words of a list", plant_common, has_depth=False),
    Task("frequent-words", "the three most frequent of invented words", plant_frequent, has_depth=False),
)
