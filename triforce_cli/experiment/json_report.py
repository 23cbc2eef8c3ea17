"""An experiment's report as one JSON object: the same values, measurements and outcomes as in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from .judge import measured_value
from .report import Outcome, git_commit, verdicts_of


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of the object. What was not measured or planned is null."""
    experiment, measured = outcome.experiment, outcome.measured
    names = ("name", "title", "reproduces", "needs", "shows", "judged")
    return {
        "type": "experiment",
        **{name: getattr(experiment, name).strip() for name in names},
        "interrupted": outcome.interrupted,
        "quick": outcome.quick,
        "own_setup": outcome.is_own and not outcome.changed,
        "values": _values(outcome),
        "measured": None if measured is None else measured.as_json(outcome.interrupted),
        "verdicts": [asdict(each) for each in verdicts_of(outcome)],
        "command": outcome.command,
        "triforce": version("triforce"),
        "commit": git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _values(outcome: Outcome) -> Sequence[dict[str, Any]]:
    rows = outcome.measured.rows() if outcome.measured is not None and outcome.is_own else []
    return [
        {
            "what": each.value.what,
            "measure": each.value.measure,
            "published": each.value.published,
            "source": each.value.source,
            "planned": each.planned,
            "reason": each.reason or None,
            "measured": measured_value(each.value, rows),
        }
        for each in outcome.planned
    ]
