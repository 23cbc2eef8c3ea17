"""Scores of an output, from 0 to 1, by its text alone: no other model judges."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

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
