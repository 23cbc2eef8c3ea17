"""The engines of modes: one after the other, for the weights of one may not fit beside those of another."""

from typing import Any

from offload.engine import Engine

from ..output.progress import ProgressDisplay
from .quality_modes import OpenMode


class ModeEngines:
    """Loads one mode after the other. What the last one has loaded serves again where nothing of it differs.

    Attributes:
        described: the first engine, in text; "" before it is loaded.
    """

    def __init__(self, display: ProgressDisplay) -> None:
        self.described = ""
        self._display = display
        self._engine: Engine | None = None
        self._loaded: OpenMode | None = None

    def load(self, mode: OpenMode, length: int) -> Engine:
        """Return a mode's engine, with empty caches for sequences of `length`, which no token ends."""
        last, engine = self._loaded, self._engine
        if engine is not None and last is not None and _loads(last) == _loads(mode):
            engine.release()
        else:
            self._engine = self._loaded = engine = None  # free its memory first
            self._display.loading(f"{mode.name} · loading {mode.settings.engine.model}")
            engine = self._engine = mode.model.load(tiers=mode.tiers).without_end()
            self._loaded = mode
        engine.reserve(mode.longest(length))
        self.described = self.described or engine.describe()
        return engine


def _loads(mode: OpenMode) -> tuple[Any, ...]:
    """Return all that the engine of a mode depends on."""
    return mode.settings.engine, mode.tiers, mode.model.checkpoint.shape.context
