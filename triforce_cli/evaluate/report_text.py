"""An evaluation as text: scores by task and mode, heat maps by length and depth, and what makes the scores doubtful."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from offload.settings.config import LEAST_BUDGET
from offload.units import counted

from ..bench.cells import Record
from ..bench.compared import EXACT
from ..output.tables import SEPARATOR, Column, lines_text, table
from .report import ALL, Evaluation

_COLOURS = ("on red3", "on dark_orange3", "on gold3", "on chartreuse3", "on green3")
_CELL = 6  # of the heat map, in characters


def evaluation_text(evaluation: Evaluation, width: int | None) -> Text:
    """Return the title, the scores by task and mode, and a heat map for each mode."""
    rows, modes = evaluation.rows(), evaluation.modes
    if not rows:
        return Text("nothing was answered\n")
    facts, count = evaluation.facts, len(evaluation.scores(modes[0]))
    title = (facts["machine"]["name"], facts["machine"]["engine"], facts["model"], counted(count, "item"))
    parts = [lines_text([SEPARATOR.join(each for each in title if each)], width)]
    columns = [Column("score of 100", style="cyan")]
    columns += [Column(mode, right=True, dropped=number) for number, mode in enumerate(modes)]
    by_task: dict[str, list[str]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(_score(row))
    parts.append(table(columns, [[task, *texts] for task, texts in by_task.items()], width))
    parts += heat_map(evaluation.cells(), modes)
    return Text("\n").join([*parts, lines_text(_notes(rows, evaluation.records), width, "yellow")])


def _score(row: Mapping[str, Any]) -> str:
    if row["score"] is None:
        return ""
    low, high = row["interval"]
    return f"{100 * row['score']:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def _notes(rows: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> Iterator[str]:
    """Yield what a reader should know: differences from the exact mode, and tasks that tell nothing."""
    for row in rows:
        if row["task"] == ALL and row["difference"] is not None:
            low, high = (100 * each for each in row["difference_interval"])
            sure = "" if low <= 0 <= high else ", more than chance"
            points = f"{100 * row['difference']:+.1f} points ({low:+.1f} to {high:+.1f})"
            yield f"{row['mode']} against exact: {points}{sure}"
    if whole := _whole(records):
        yield f"no prompt is longer than what {', '.join(whole)} keep: take a longer --context, or a smaller --budget"
    failed = [row["task"] for row in rows if row["mode"] == EXACT and row["score"] is not None and row["score"] < 0.5]
    failed = [task for task in failed if task != ALL]
    if failed:
        yield f"the exact model itself fails at {', '.join(failed)}: these compare no modes"
    yield "in brackets: 95 % intervals (Wilson's; of differences on the same items, bootstrap)"


def _whole(records: Sequence[Record]) -> list[str]:
    """Return the approximate modes whose cache has room for all tokens of every prompt."""
    fit: dict[str, bool] = {}
    for record in records:
        mode, settings = record["mode"], record["settings"]
        if settings.get("approximate"):
            fits = record["prompt_tokens"] <= (settings.get("budget") or LEAST_BUDGET)
            fit[mode] = fit.get(mode, True) and fits
    return [mode for mode, fits in fit.items() if fits]


def heat_map(cells: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> list[Text]:
    """Return a map for each mode: a line for each length, and a column for each depth."""
    return [_one(mode, [cell for cell in cells if cell["mode"] == mode]) for mode in modes if cells]


def _one(mode: str, cells: Sequence[Mapping[str, Any]]) -> Text:
    depths = sorted({cell["depth"] for cell in cells})
    scores = {(cell["length"], cell["depth"]): cell["score"] for cell in cells}
    found = Text(f"{mode}, by length and depth\n", style="bold")
    found.append(" " * 9 + "".join(f"{f'{100 * depth:.0f} %':>{_CELL}}" for depth in depths) + "\n", style="not bold")
    for length in sorted({cell["length"] for cell in cells}):
        found.append(f"{length:>8,} ", style="not bold")
        for depth in depths:
            score = scores.get((length, depth))
            text = "" if score is None else f"{100 * score:.0f} "
            found.append(f"{text:>{_CELL}}", style="" if score is None else f"not bold black {_colour(score)}")
        found.append("\n")
    return found


def _colour(score: float) -> str:
    return _COLOURS[min(int(score * len(_COLOURS)), len(_COLOURS) - 1)]
