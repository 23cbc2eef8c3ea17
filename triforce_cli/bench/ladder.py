"""The ladder: all methods at several lengths of a text, for three kinds of output. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .axes import Values
from .compared import BASE
from .positions import summed
from .report import Row

# What stands behind the text, and is continued: what is said in other words, word for word, and in a few words.
OUTPUTS = {
    "summary": "\n\nA summary of the text above, in one paragraph:\n\n",
    "quotation": "\n\nThe first paragraph of the text above, quoted word for word:\n\n",
    "question": "\n\nQuestion: Who are the people in the text above, and what do they want?\nAnswer:",
}
TEMPERATURES = Values((0.0, 0.8))
LEAST = 10  # verified tokens for a rate
EQUAL, TIE, DIFFERENT, FAILED = "equal", "tie", "different", "failed"


def with_outputs(texts: Iterable[tuple[str, str]]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return each text once for each kind of output, named so, and what stands behind each, by its name."""
    found = [(f"{name} · {output}", text) for name, text in texts for output in OUTPUTS]
    return found, {name: OUTPUTS[output_of(name)] for name, _ in found}


def output_of(name: str) -> str:
    """Return the kind of output of a prompt's name."""
    return name.rpartition(" · ")[2]


def in_order(places: Sequence[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Return pairs of prompt and context so that each read goes on from the last one.

    All outputs of a text at one length are next to each other, and differ in their ends.
    """
    return sorted(places, key=lambda place: (place[0] // len(OUTPUTS), place[1] or 0, place[0]))


def verdict(row: Row) -> str | None:
    """Return whether a row's outputs are those of plain decoding: EQUAL, TIE or DIFFERENT; None if not compared.

    FAILED for a peer that did not run.
    """
    if row.get("error") is not None:
        return FAILED
    if row["method"] == BASE or row["equals_ar"] is None:
        return None
    return EQUAL if row["equals_ar"] else TIE if row["lossless"] else DIFFERENT


def same_answers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each method and length how many outputs are those of plain decoding, tie with it, or differ.

    `margin` is the largest difference of logits among those that are not equal; None if all are.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["verdict"] not in (None, FAILED):
            groups.setdefault((row["method"], row["context"]), []).append(row)
    found: list[dict[str, Any]] = []
    for (method, context), each in groups.items():
        counts = Counter(row["verdict"] for row in each)
        counted = {name: counts[name] for name in (EQUAL, TIE, DIFFERENT)}
        margin = max((row["margin"] for row in each if row["margin"] is not None), default=None)
        found.append({"method": method, "context": context, **counted, "margin": margin})
    return found


def positions(rows: Iterable[Row], name: str) -> dict[str, list[float | None]]:
    """Return by method the rate at which drafted tokens are accepted, by position; None where it means little.

    That is where fewer than LEAST tokens were verified.
    """
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row["method"], []).append(row[name])
    rates = {
        method: [taken / of if of >= LEAST else None for of, taken in summed(each)] for method, each in groups.items()
    }
    return {method: each for method, each in rates.items() if each}


def mean_by(rows: Iterable[Row], measure: str, **where: Any) -> dict[str, list[tuple[int, float]]]:
    """Return by method a measure's mean at each length, over the kinds of output, of rows with these values."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row[measure] is not None and all(row[name] == value for name, value in where.items()):
            found.setdefault(row["method"], {}).setdefault(row["context"], []).append(row[measure])
    return {
        method: [(context, sum(each) / len(each)) for context, each in sorted(points.items())]
        for method, points in found.items()
    }


def verdict_text(row: Row) -> str:
    """Return a row's verdict, with the token at which another program's answer becomes a different one."""
    at = f" at {row['differs_at']}" if row["is_peer"] and row["differs_at"] is not None else ""
    return "-" if row["verdict"] is None else f"{row['verdict']}{at}"


def drafter_of(acceptance: Mapping[str, float]) -> str:
    """Return what drafted, of acceptances by "drafter -> verifier"; "-" for none."""
    return ", ".join(dict.fromkeys(pair.partition(" -> ")[0] for pair in acceptance)) or "-"
