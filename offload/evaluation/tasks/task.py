"""What a task is, and an item of it: a text of some length with something hidden at a depth, and a question."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice
from random import Random

from ...sequence import common_prefix

_WORDS = re.compile(r"\w+")


def share_found(output: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that occur in an output, whatever their case (RULER's string_match_all)."""
    text = output.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def likeness(output: str, answers: Sequence[str]) -> float:
    """Return how much of the one answer an output repeats, in order: MRCR's ratio, of words.

    What comes after as many words as the answer has is not read: a model may go on.
    """
    (answer,) = map(_WORDS.findall, answers)
    return SequenceMatcher(None, answer, _WORDS.findall(output)[: len(answer)], autojunk=False).ratio()


def share_continued(output: str, answers: Sequence[str]) -> float:
    """Return the share of the one answer's words that an output begins with, up to the first other word."""
    (answer,), found = map(_WORDS.findall, answers), _WORDS.findall(output)
    return common_prefix(answer, found) / len(answer)


@dataclass(frozen=True, slots=True)
class Planted:
    """What a task hides, and what it asks.

    Args:
        pieces: what is hidden, each with its depth, from 0 for the text's beginning to 1 for its end.
        question: asks for the answers.
        start: how the answer begins, which a model without a chat template continues.
        answers: the texts that are right.
        units: returns a text of its own, as so many units; None where the pieces are hidden in the user's text.
        joint: what stands between two units.
    """

    pieces: Sequence[tuple[float, str]]
    question: str
    start: str
    answers: tuple[str, ...]
    units: Callable[[int], Sequence[str]] | None = None
    joint: str = " "


@dataclass(frozen=True, slots=True)
class Task:
    """A task: `plant` returns what it hides, of a source of random numbers and the depth of what is asked for."""

    name: str
    about: str
    plant: Callable[[Random, float], Planted]
    score: Callable[[str, Sequence[str]], float] = share_found
    has_depth: bool = True


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a task: the text, what is asked about it, how the answer begins, and the answers.

    Attributes:
        depth: where what is asked for lies; None for a task without depth.
        new_tokens: tokens that an answer may take.
    """

    task: Task
    length: int
    depth: float | None
    seed: int
    text: str
    question: str
    start: str
    answers: tuple[str, ...]
    new_tokens: int

    @property
    def prompt(self) -> str:
        """Return what a model continues."""
        return f"{self.text}\n\n{self.question} {self.start}"

    def score(self, output: str) -> float:
        """Return the score of what a model said after the prompt."""
        return self.task.score(output, self.answers)


class TextTooShort(ValueError):
    """A text has fewer tokens than an item needs, or a length has no room for the question."""


def make_item(
    task: Task, length: int, depth: float, seed: int, sentences: Sequence[str], count: Callable[[str], int]
) -> Item:
    """Return an item whose prompt and answer have `length` tokens at most, and less by one sentence at the most.

    `sentences` are the text to hide things in, as long as the longest item; `count` returns a text's tokens. The same
    arguments give the same item. Raises TextTooShort.
    """
    planted = task.plant(Random(f"{task.name} {seed} {depth}"), depth)
    new_tokens = count(" ".join(planted.answers)) + 8 * len(planted.answers)
    most = length if planted.units is not None else len(sentences)

    def item(units: int) -> Item:
        taken = sentences[:units] if planted.units is None else planted.units(units)
        text = planted.joint.join(hide(taken, planted.pieces))
        at = depth if task.has_depth else None
        asked = planted.question, planted.start, planted.answers
        return Item(task, length, at, seed, text, *asked, new_tokens)

    units = _most_units(lambda units: count(item(units).prompt) + new_tokens, length, most)
    if units == 0:
        raise TextTooShort(f"{length:,} tokens are too few for {task.name}")
    if units == most and planted.units is None:
        raise TextTooShort(f"the text is too short for {length:,} tokens")
    return item(units)


def _most_units(tokens: Callable[[int], int], length: int, most: int) -> int:
    """Return how many units, up to `most`, have `length` tokens at most; 0 if not one has.

    Units have about equally many, so the first guesses come near: a long text takes a while to count.
    """
    least = tokens(1)
    if least > length:
        return 0
    low, used, each = 1, least, 1.0  # `low` units fit and use so many tokens; `high` do not fit, or are too many
    high, guess, guesses = most + 1, min(64, most), 0
    while high - low > 1:
        found = tokens(guess)
        each = max((found - least) / (guess - 1), 1e-3)
        if found <= length:
            low, used = guess, found
        else:
            high = guess
        guesses += 1
        near = low + int((length - used) / each) if guesses < 6 else (low + high) // 2
        guess = min(max(near, low + 1), high - 1)
    return low


def hide(units: Sequence[str], pieces: Iterable[tuple[float, str]]) -> list[str]:
    """Return the units with the pieces between them, each at its depth."""
    found = list(units)
    for depth, piece in sorted(pieces, key=lambda each: -each[0]):
        found.insert(round(depth * len(units)), piece)
    return found


def around(depth: float, texts: Sequence[str]) -> list[tuple[float, str]]:
    """Return texts with their depths: the first at this one, the others evenly around the text."""
    return [((depth + index / len(texts)) % 1, text) for index, text in enumerate(texts)]


def enough(sentences: Iterable[str], length: int) -> list[str]:
    """Return the first sentences, which are enough for `length` tokens: each has at least one."""
    return list(islice(sentences, length + 1))
