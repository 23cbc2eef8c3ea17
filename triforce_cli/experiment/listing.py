"""The list of experiments: how many values each has, and how far plans are from the published ones."""

from typing import Any

from ..output.tables import Column, table
from .definition import Experiment
from .outcome import Outcome
from .plans import plan_values
from .shipped import available, load


def listed() -> list[dict[str, Any]]:
    """Return the experiments that come with the program, with their values. Raises TriforceError."""
    return [_fields(load(name)) for name in available()]


def list_text(experiments: list[dict[str, Any]], width: int | None) -> Any:
    """Return the list as a table without heads."""
    columns = (Column("", style="cyan"), Column("", least=16), Column("", dropped=1), Column(""))
    rows = [(each["name"], each["title"], each["kind"], _agreement(each)) for each in experiments]
    return table(columns, rows, width, headed=False)


def _fields(each: Experiment) -> dict[str, Any]:
    values = Outcome(each, plan_values(each.values)).values()
    errors = [value["error"] for value in values if value["error"] is not None]
    judged = [value for value in values if value["error"] is not None and value["within"] is not None]
    return {
        "name": each.name,
        "title": each.title,
        "kind": _kind(each),
        "published": sum(value["published"] is not None for value in values),
        "planned": sum(value["planned"] is not None for value in values),
        "judged": len(judged),
        "agree": sum(abs(value["error"]) <= value["within"] for value in judged),
        "errors": [min(errors), max(errors)] if errors else None,
        "values": values,
    }


def _kind(each: Experiment) -> str:
    kinds = {"planned": any(value.plan is not None for value in each.values), "measured": each.bench is not None}
    return " and ".join(kind for kind, is_kind in kinds.items() if is_kind)


def _agreement(each: dict[str, Any]) -> str:
    """Return how many values are published, how many planned ones are within their tolerance, and the errors."""
    if not each["published"]:
        return "none published"
    if each["errors"] is None:
        return f"{each['published']} published, none planned"
    least, most = each["errors"]
    return f"{each['published']} published, {each['agree']} of {each['judged']} agree, {least:+.0%} to {most:+.0%}"
