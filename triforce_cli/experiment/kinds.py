"""What an experiment can measure, and what its methods are then called. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import SettingsError
from offload.settings.methods import MIDDLES

from ..bench.methods import BASE
from ..bench.methods import parse as parse_methods
from ..bench.quality.modes import parse as parse_modes

SPEED, QUALITY, ATTENTION = "speed", "quality", "attention"
ACCEPTANCE = "acceptance"
IDEAL = "ideal"  # of attention: the tokens with the most weight


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of measurement: `parse` returns the names of its rows, that which others are compared with first."""

    parse: Callable[[Sequence[str]], tuple[str, ...]]
    measures: tuple[str, ...]


def _methods(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((BASE, *parse_methods(",".join(names)))))


def _modes(names: Sequence[str]) -> tuple[str, ...]:
    return parse_modes(",".join(names))


def _selections(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in (IDEAL, *MIDDLES):
            raise SettingsError(f"there is no selection {name!r}", f"selections: {', '.join((IDEAL, *MIDDLES))}")
    return tuple(dict.fromkeys((IDEAL, *names)))


KINDS = {
    SPEED: Kind(_methods, ("speedup", "tbt_ms", ACCEPTANCE, "tokens_per_s", "tokens_per_verification")),
    QUALITY: Kind(_modes, ("perplexity", "kl", "top1_agreement", "needles_found", "needle_log_prob")),
    ATTENTION: Kind(_selections, ("recovered",)),
}
MEASURES = tuple(name for kind in KINDS.values() for name in kind.measures)
