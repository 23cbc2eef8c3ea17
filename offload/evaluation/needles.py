"""The needle test of `bench --quality`: a pass key said once in the user's text, by the probability of the pass key.

The text itself goes on with the key, and no question stands before it: models of 135M parameters find that at 8K
tokens, and instructions less often. The log-probability tells more than whether it is found: it also measures how
nearly.
"""

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from ..events import Prefilled
from ..sequence import common_prefix
from .teacher_forcing import Predictor, score_text

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Needle:
    """A text with a needle: `prompt` ends with the question, `answer` are the tokens of the pass key.

    `depth` is where the needle is, from 0 for the beginning to 1 for the end; None if it is not there at all.
    """

    depth: float | None
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NeedleScore:
    """Whether greedy decoding gives the pass key, and the mean log-probability of its tokens in nats."""

    depth: float | None
    found: bool
    log_prob: float


def make_needles(text: Sequence[int], encode: Encode, count: int) -> list[Needle]:
    """Return `count` needles at evenly spaced depths, the deepest first, and one that is not there.

    Each is in a copy of `text` that is shortened at its end, so that prompt and answer have as many tokens as the text.
    The beginnings are the same up to the needle: caches run them once. Raises ValueError for a text that is too short.
    """
    draw = random.Random(0)
    depths = [None, *((index + 0.5) / count for index in reversed(range(count)))]
    return [_make_needle(text, encode, depth, str(draw.randint(1_000_000, 9_999_999))) for depth in depths]


def _make_needle(text: Sequence[int], encode: Encode, depth: float | None, key: str) -> Needle:
    said = f"The pass key is {key}."
    needle, question = encode(f"\n\n{said} Remember it. {said}\n\n"), encode("\n\nThe pass key is")
    asked = encode(f"\n\nThe pass key is {key}")
    start = common_prefix(question, asked)  # a tokenizer may merge the last word and the space
    question, answer = asked[:start], asked[start:]
    room = len(text) - len(needle) - len(question) - len(answer)
    if room < 2:
        raise ValueError(f"{len(text)} tokens are too few for a needle of {len(text) - room}")
    body = list(text[:room])
    if depth is not None:
        at = max(1, round(depth * room))
        body[at:at] = needle
    return Needle(depth, (*body, *question), tuple(answer))


def score_needle(predictor: Predictor, needle: Needle) -> Generator[Prefilled, None, NeedleScore]:
    """Read the needle's text and score the pass key after the question; yields the progress of reading."""
    scores = yield from score_text(predictor, [*needle.prompt, *needle.answer], len(needle.answer))
    found = scores.choices.tolist() == list(needle.answer)
    return NeedleScore(needle.depth, found, float(scores.log_probs.double().mean()))
