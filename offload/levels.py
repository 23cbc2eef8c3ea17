"""Which levels a request's settings ask for, and how many tokens the caches of those levels hold.

For code that runs the levels and for code that only counts their bytes. Imports nothing heavy.
"""

from __future__ import annotations

from .config import LONGEST_GAMMA, Speculation
from .methods import CHOSEN, LOOKUP, METHODS, MODEL

TAIL = 4 * LONGEST_GAMMA  # tokens that the retrieval cache holds beside its budget: drafts and the newest tokens
_WORTH = 2  # a retrieval cache must be smaller than the context by this factor to pay


def draft_chunk(settings: Speculation) -> int:
    """Return how many tokens a draft model reads in one pass."""
    return max(settings.window, 2 * LONGEST_GAMMA)


def draft_room(settings: Speculation) -> int:
    """Return how many tokens a draft model's cache has room for."""
    return settings.sink + 2 * settings.window + 2 * draft_chunk(settings)


def has_middle(settings: Speculation, tokens: int) -> bool:
    """Return whether a sequence that may reach `tokens` gets a retrieval cache."""
    method = METHODS[settings.method]
    if method.adaptive:
        return method.middle is not None and tokens > _WORTH * (settings.budget + TAIL)
    return method.middle is not None


def drafter_kind(settings: Speculation) -> str | None:
    """Return what drafts: methods.LOOKUP, methods.MODEL, or None."""
    kind = METHODS[settings.method].drafter
    if kind != CHOSEN:
        return kind
    return MODEL if settings.draft_model is not None else LOOKUP if settings.draft == LOOKUP else None


def has_draft_model(settings: Speculation) -> bool:
    """Return whether a draft model will be used."""
    return drafter_kind(settings) == MODEL
