"""The n-th of several similar requests in a long chat, whose answer is to be repeated (MRCR, arXiv 2409.12640)."""

from random import Random

from .task import Planted, Task, likeness
from .words import NOUNS, sentence

_ALIKE = ("first", "second", "third", "fourth")
_FORMS = ("poem", "letter", "story", "speech")


def plant(draw: Random, depth: float) -> Planted:
    """Return chats of any length with four answers to one request; the one at the depth is asked for."""
    form, topic = draw.choice(_FORMS), draw.choice(NOUNS)
    answers = [_answer(draw) for _ in _ALIKE]
    alike = [_turn(form, topic, answer) for answer in answers]
    asked = min(int(depth * len(_ALIKE)), len(_ALIKE) - 1)
    seed = draw.random()

    def units(count: int) -> list[str]:
        others = Random(seed)
        topics = [noun for noun in NOUNS if noun != topic]
        return [_turn(others.choice(_FORMS), others.choice(topics), _answer(others)) for _ in range(count)]

    pieces = [((index + 0.5) / len(_ALIKE), turn) for index, turn in enumerate(alike)]
    question = f"User: Repeat the {_ALIKE[asked]} {form} about the {topic}, word for word."
    return Planted(pieces, question, "\nAssistant:", (answers[asked],), units, "\n\n")


def _turn(form: str, topic: str, answer: str) -> str:
    return f"User: Write a {form} about the {topic}.\nAssistant: {answer}"


def _answer(draw: Random) -> str:
    return " ".join(sentence(draw) for _ in range(3))


TURNS = Task("turns", "the n-th of four equal requests in a chat", plant, likeness)
