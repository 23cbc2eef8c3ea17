"""A question about a person, beside facts about others that share a name with him."""

from random import Random

from .task import Planted, Task, around
from .words import CITIES, FIRST_NAMES, LAST_NAMES


def plant(draw: Random, depth: float) -> Planted:
    """Return where a person lives, at a depth, and as distractors where namesakes live, and where he was born."""
    (first, other_first), (last, other_last) = draw.sample(FIRST_NAMES, 2), draw.sample(LAST_NAMES, 2)
    home, born, *elsewhere = draw.sample(CITIES, 5)
    name = f"{first} {last}"
    said = [
        f"{name} has lived in {home} for many years.",
        f"{first} {other_last} has lived in {elsewhere[0]} for many years.",
        f"{other_first} {last} has lived in {elsewhere[1]} for many years.",
        f"{name} was born in {born}.",
        f"A friend of {name} has lived in {elsewhere[2]} for many years.",
    ]
    return Planted(around(depth, said), f"In which city does {name} live?", f"{name} lives in", (home,))


QUESTIONS = Task("questions", "a question, with distractors about namesakes", plant)
