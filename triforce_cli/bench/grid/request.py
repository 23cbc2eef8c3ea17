"""What a grid is asked to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...options.request import Request
from .axes import BATCH, CONTEXT, Values


@dataclass(frozen=True, slots=True)
class GridRequest:
    """A request and a grid.

    Args:
        texts: the prompts' names and texts.
        methods: None is all that can run.
        axes: the settings that vary, but for the context; the request's settings have the first value of each.
        contexts: tokens to use of each prompt; None is all.
        excerpts: prompts made from each text, from places that are far from each other.
        points: the file of finished runs.
        batches: numbers of sequences that are decoded together, the others from further places of the text.
        endings: what stands behind each text, by its name, such as a question about it; no context cuts it off.
        is_dataset: whether `excerpts` counts texts that are long enough, each a prompt.
        only: combinations of values that run, of all that the lists have; empty for all.
    """

    request: Request
    texts: Sequence[tuple[str, str]]
    methods: tuple[str, ...] | None
    axes: Mapping[str, Values]
    contexts: tuple[int, ...] | None
    excerpts: int
    repeats: int
    points: Path | None = None
    batches: tuple[int, ...] = (1,)
    only: Sequence[Mapping[str, Any]] = ()
    endings: Mapping[str, str] = field(default_factory=dict)
    is_dataset: bool = False

    @property
    def varied(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of all that varies."""
        contexts = {CONTEXT: self.contexts} if self.contexts is not None and len(self.contexts) > 1 else {}
        batches = {BATCH: self.batches} if len(self.batches) > 1 else {}
        return contexts | batches | {name: tuple(values) for name, values in self.axes.items()}

    def includes(self, values: Mapping[str, Any]) -> bool:
        """Return whether a combination of values runs."""
        named = [{name: each for name, each in one.items() if name in values} for one in self.only]
        return not named or any(each.items() <= values.items() for each in named)
