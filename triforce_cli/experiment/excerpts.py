"""Excerpts of texts, as the prompts of what is measured on a text and not on a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..input.dataset import DataText


def excerpts(texts: Sequence[DataText], count: int, is_dataset: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of `count` excerpts of each text, which begin at words far from each other.

    Of a data set they are its first `count` texts, as they are.
    """
    for each in texts[:count] if is_dataset else texts:
        number_of = 1 if is_dataset else count
        for number in range(number_of):
            start = len(each.text) * number // number_of
            start = each.text.find(" ", start) + 1 if start else 0
            yield (each.name if number_of == 1 else f"{each.name} {number + 1}/{count}"), each.text[start:]
