"""Passes of a fixed number of rows, all of whose tensors stay where they are: what a CUDA graph can record.

A pass of fewer rows is filled up: the rows behind its tokens are computed and stored like the others, behind the
committed tokens, and nobody reads them before they are overwritten.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from .protocol import Attends, KVCache


class StaticStep(Attends, Protocol):
    """Attention of a pass of a fixed number of rows over one cache."""

    def load(self) -> None:
        """Set the inputs, in a few launches and without waiting, for the pass that the cache has begun."""
        ...


class StaticCache(KVCache, Protocol):
    """A cache that can fill up passes of few tokens to a fixed number of rows, in tensors that stay where they are."""

    def fits(self, rows: int) -> bool:
        """Return whether so many rows can follow the committed tokens now."""
        ...

    def begin_padded(self, tokens: int, rows: int) -> None:
        """Begin a pass over `tokens` tokens as `begin` does, filled up to `rows` rows, which fit."""
        ...

    def step_key(self) -> Hashable:
        """Return what else a recording depends on beside its rows; it serves as long as this is the same."""
        ...

    def new_step(self, rows: int) -> StaticStep:
        """Return a step of `rows` rows, whose tensors are allocated here and nowhere else."""
        ...

    def clear(self) -> None:
        """Set all keys and values to zero: masked values are multiplied by zero, so they must not be NaN."""
        ...
