"""Prompts from several places of a text."""

from __future__ import annotations

from offload.errors import PromptError


class TextTooShort(PromptError):
    """A text has too few tokens for the prompts asked for. `tokens` is how many it has."""

    def __init__(self, tokens: int, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.tokens = tokens


def windows(beginning: list[int], ids: list[int], length: int, count: int) -> list[list[int]]:
    """Return `count` prompts of `length` tokens from places of a text that are far from each other.

    They begin with the model's own `beginning`, and go on at the text's start after its end. Raises TextTooShort if the
    text has fewer tokens than there are prompts.
    """
    if count > len(ids):
        raise TextTooShort(
            len(ids),
            f"a batch of {count:,} needs as many places to begin at, and the text has {len(ids):,} tokens",
            "give a longer text, or a smaller --batch",
        )
    starts = [len(ids) * number // count for number in range(count)]
    taken = length - len(beginning)
    turns = -(-(starts[-1] + taken) // len(ids))
    return [beginning + (ids * turns)[start : start + taken] for start in starts]
