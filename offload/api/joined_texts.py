"""Joins a document and what is asked about it. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence


def join_texts(texts: Sequence[str]) -> str:
    """Return texts as one, with one blank line at each joint; everything else is unchanged."""
    joined = texts[0]
    for text in texts[1:]:
        joined = joined.rstrip("\n") + "\n\n" + text.lstrip("\n")
    return joined
