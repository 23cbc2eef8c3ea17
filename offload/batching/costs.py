"""The time of a pass, divided between the sequences that it has run: who drafts pays for the rows that drafts add."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ..settings.method_sizes import KEPT_QUERIES
from ..speculation.passes.estimators import ATTENTION_COST, ROW_COST
from ..speculation.passes.steps import Step
from .lane import LogitsRequest

_FORGET = 1.01  # a plain pass may take so much longer than the one before: contexts grow


class PassCosts:
    """Divides the time of passes between their sequences.

    By rows and bytes alone, a draft would look cheap where it makes the pass of all slower, such as one of too many
    rows for a single call of the kernel. So where the time of a pass without drafts is known, what a pass with
    drafts takes longer is theirs.
    """

    def __init__(self) -> None:
        self._plain: dict[Hashable, float] = {}  # seconds of the fastest pass of one row each, by models

    def divide(self, steps: Sequence[Step], seconds: float) -> list[float]:
        """Return the seconds of each step of a pass; their sum is `seconds`."""
        models = tuple(sorted(id(step.model) for step in steps))
        extra = [len(step.ids) - 1 for step in steps]
        if not any(extra):
            self._plain[models] = min(self._plain.get(models, seconds) * _FORGET, seconds)
        elif models in self._plain and max(extra) < KEPT_QUERIES:
            plain = min(self._plain[models], seconds)
            parts = zip(shares([replace(step, ids=step.ids[:1]) for step in steps]), extra, strict=True)
            return [share * plain + rows / sum(extra) * (seconds - plain) for share, rows in parts]
        return [share * seconds for share in shares(steps)]


def shares(parts: Sequence[Step] | Sequence[LogitsRequest]) -> list[float]:
    """Return the share of the time that each part takes; their sum is 1.

    The weights are read once for all. Each part reads its own keys and values, and computes its own rows.
    """
    costs = [_own_cost(part) + part.model.read_cost / len(parts) for part in parts]
    return [cost / sum(costs) for cost in costs]


def _own_cost(part: Step | LogitsRequest) -> float:
    """Return what a part adds, in bytes of weights that take as long to read."""
    weights = part.model.read_cost
    if isinstance(part, LogitsRequest):
        return ROW_COST * weights * (len(part.hidden) - 1)
    kv = ATTENTION_COST * part.model.shape.full_attention.kv_bytes(1, part.model.dtype.itemsize) * part.keys
    experts = part.model.read_cost_of(len(part.ids)) - weights  # those that only its further rows read
    return kv + experts + ROW_COST * (weights + kv) * (len(part.ids) - 1)
