"""Which levels a method has, and what their caches hold: for those who run them and those who only count.

Imports nothing heavy.
"""

from __future__ import annotations

from .config import LONGEST_GAMMA, Speculation

TAIL = 4 * LONGEST_GAMMA  # tokens that the retrieval cache holds beside its budget: drafts, and what is newest
_WORTH = 2  # a retrieval cache that is not smaller than the context by this factor cannot pay


def draft_chunk(settings: Speculation) -> int:
    """Tokens that a draft model reads at once."""
    return max(settings.window, 2 * LONGEST_GAMMA)


def draft_room(settings: Speculation) -> int:
    """Tokens that a draft model's cache has room for."""
    return settings.sink + 2 * settings.window + 2 * draft_chunk(settings)


def has_middle(settings: Speculation, tokens: int) -> bool:
    """Whether a sequence that may reach so many tokens gets a retrieval cache."""
    if settings.method == "auto":
        return tokens > _WORTH * (settings.budget + TAIL)
    return settings.method in ("triforce", "retrieval", "streaming")


def has_draft_model(settings: Speculation) -> bool:
    """Whether a draft model will be used."""
    return settings.draft_model is not None and settings.method not in ("ar", "lookup", "retrieval")
