"""Continue a literal passage of the text, of which the beginning is quoted.

The passage is invented: a model may know those of a book by heart.
"""

from random import Random

from .task import Planted, Task, share_continued
from .words import ADJECTIVES, NOUNS

_QUOTED, _ASKED = 12, 16  # words


def plant(draw: Random, depth: float) -> Planted:
    """Return a passage at a depth, and its beginning as the question."""
    words = draw.sample([*ADJECTIVES, *NOUNS], _QUOTED + _ASKED)
    quoted, asked = " ".join(words[:_QUOTED]), " ".join(words[_QUOTED:])
    passage = f"The old inscription reads: {quoted} {asked}."
    question = "How does the old inscription go on?"
    return Planted([(depth, passage)], question, f"The old inscription reads: {quoted}", (asked,))


QUOTATION = Task("quotation", "continue a passage word for word", plant, share_continued)
