"""Rows of numbers from the finished runs of cells: medians over repeats, mean and spread over prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from offload.sequence import common_prefix
from offload.settings.generation import FASTEST

from .axes import BATCH, CONTEXT
from .cells import Cell, Record
from .positions import summed
from .report import BY_PAIR, spread

_POINT = ("tokens_per_s", "speedup", "tokens_per_verification", "tbt_median_s")
_METHOD = ("ttft_s", "tbt_median_s", "tbt_p95_s", "tokens_per_s", "tokens_per_verification")
_BY_KEY = (*BY_PAIR, "time_share")
_METHOD_RUN = (*_METHOD, "verifications", *_BY_KEY, "total_s", "tbt_s", "tokens")
_POSITIONS = ("draft_positions", "answer_positions")
_BATCH_RUN = ("tokens_per_s", "seconds", "total_s")


@dataclass(frozen=True, slots=True)
class Finished:
    """The finished runs.

    Args:
        cells: all that there are, done or not.
        base: of each cell, that which it is compared with under the same conditions: plain decoding, or, of several
            sequences together, the same ones one after the other.
        records: the finished runs of each cell that has some, by repeat.
    """

    cells: Sequence[Cell]
    base: Mapping[Cell, Cell]
    records: Mapping[Cell, Sequence[Record]]

    @property
    def _done(self) -> list[Cell]:
        return [cell for cell in self.cells if self.records.get(cell)]

    def methods(self, memory: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return a row for each method on one prompt, with the bytes of `memory` that each takes.

        `speedup_range` and `spread` are None for a single run.
        """
        return [self._method(cell) | {"memory_bytes": memory[cell.method]} for cell in self._done]

    def _method(self, cell: Cell) -> dict[str, Any]:
        runs, plain = self.records[cell], self.records.get(self.base[cell], ())
        rates = _present(runs, "tokens_per_s")
        ratios = [rate / base for rate, base in zip(rates, _present(plain, "tokens_per_s"), strict=False)]
        differs_at, is_equal = self._compared(cell)
        return {
            "method": cell.method,
            "repeats": len(runs),
            **{name: _median(runs, name) for name in (*_METHOD, "nodes")},
            **{name: _medians(runs, name) for name in _BY_KEY},
            "mask_s": _medians(runs, "mask_s") or None,
            "speedup": self._ratio(cell),
            "speedup_range": (min(ratios), max(ratios)) if len(ratios) > 1 else None,
            "spread": spread(rates),
            "differs_at": differs_at,
            "equals_ar": is_equal,
            "lossless": _lossless(runs),
            "runs": [{name: run.get(name) for name in _METHOD_RUN} for run in runs],  # some are not in a file
        }

    def step(self, cell: Cell) -> dict[str, Any]:
        """Return the row of a finished cell of the ladder, without its single runs."""
        runs = self.records[cell]
        row = {name: value for name, value in self._method(cell).items() if name != "runs"}
        row |= {name: summed(run.get(name, ()) for run in runs) for name in _POSITIONS}
        margins = [margin for run in runs if (margin := run.get("margin")) is not None]
        return row | {"margin": max(margins, default=None), "prompt_tokens": runs[0]["prompt_tokens"]}

    def batches(self) -> list[dict[str, Any]]:
        """Return a row for each method and batch; `ratio` is relative to the same method's batch 1."""
        return [self._batch(cell) for cell in self._done]

    def _batch(self, cell: Cell) -> dict[str, Any]:
        runs, rate = self.records[cell], _median(self.records[cell], "tokens_per_s")
        differs_at, is_equal = self._compared(cell)
        return {
            "method": cell.method,
            "batch": cell.batch,
            "repeats": len(runs),
            "tokens_per_s": rate,
            "ratio": self._ratio(cell),
            "spread": spread(_present(runs, "tokens_per_s")),
            "token_s": cell.batch / rate if rate else None,
            "total_s": _median(runs, "total_s"),
            "equals_alone": is_equal,
            "differs_at": differs_at,
            "lossless": _lossless(runs),
            "runs": [{name: run[name] for name in _BATCH_RUN} | {"outputs": outputs_of(run)} for run in runs],
        }

    def points(self, axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Return a row for each method and point.

        Each measure is the mean over the prompts of the median over the repeats; `_sd` is the standard deviation over
        the prompts, None for one prompt. `speedup` is relative to plain decoding of the same prompt.
        """
        groups: dict[Any, list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.group, []).append(cell)
        done = [[cell for cell in cells if self.records.get(cell)] for cells in groups.values()]
        return [self._point(cells, axes) for cells in done if cells]

    def _point(self, cells: Sequence[Cell], axes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        first = cells[0]
        row: dict[str, Any] = {"method": first.method}
        row |= {name: each for name, each in ((CONTEXT, first.context), (BATCH, first.batch)) if name in axes}
        row |= dict(first.values)
        row |= {"prompts": len(cells), "repeats": min(len(self.records[cell]) for cell in cells)}
        row["prompt_tokens"] = mean(self.records[cell][0]["prompt_tokens"] for cell in cells)
        for name in _POINT:
            row |= mean_and_deviation(name, [self._measure(cell, name) for cell in cells])
        for name in BY_PAIR:
            row |= self._by_pair(cells, name)
        spreads = [spread(_present(self.records[cell], "tokens_per_s")) for cell in cells]
        row["spread"] = max((each for each in spreads if each is not None), default=None)
        equal = [is_equal for cell in cells if (is_equal := self._compared(cell)[1]) is not None]
        lossless = [each for cell in cells if (each := _lossless(self.records[cell])) is not None]
        return row | {"equals_ar": all(equal) if equal else None, "lossless": all(lossless) if lossless else None}

    def _measure(self, cell: Cell, name: str) -> float | None:
        return self._ratio(cell) if name == "speedup" else _median(self.records[cell], name)

    def _ratio(self, cell: Cell) -> float | None:
        """Return the rate of a cell relative to that of its base."""
        rate, base = (_median(self.records.get(each, ()), "tokens_per_s") for each in (cell, self.base[cell]))
        return rate / base if rate and base else None

    def _by_pair(self, cells: Sequence[Cell], name: str) -> dict[str, Any]:
        """Return a measure of each pair of drafter and verifier: mean and standard deviation over the prompts."""
        found: dict[str, list[float]] = {}
        for cell in cells:
            for pair, rate in _medians(self.records[cell], name).items():
                found.setdefault(pair, []).append(rate)
        both = {pair: mean_and_deviation("", rates) for pair, rates in found.items()}
        return {f"{name}{suffix}": {pair: each[suffix] for pair, each in both.items()} for suffix in ("", "_sd")}

    def _compared(self, cell: Cell) -> tuple[int | None, bool | None]:
        """Return the first token in which a run differs from the base, and whether none does; None, None if unknown.

        Outputs are compared if they are greedy or by coupled sampling.
        """
        base = self.records.get(self.base[cell])
        runs = [run for run in self.records[cell] if run["sampling"] != FASTEST]
        if not base or not runs:
            return None, None
        pairs = [pair for run in runs for pair in zip(outputs_of(run), outputs_of(base[0]), strict=False)]
        found = [position for one, other in pairs if (position := first_difference(one, other)) is not None]
        return min(found, default=None), not found


def mean_and_deviation(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """Return the mean by the name, and the standard deviation, None for fewer than two values, by `name_sd`."""
    present = [value for value in values if value is not None]
    return {name: mean(present) if present else None, f"{name}_sd": stdev(present) if len(present) > 1 else None}


def outputs_of(record: Record) -> list[list[int]]:
    """Return the tokens of each sequence of a run, which has those of one sequence alone."""
    tokens = record["tokens"]
    return tokens if tokens and isinstance(tokens[0], list) else [tokens]


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first position at which token ids differ, or one of the two ends; None for equal ones."""
    shared = common_prefix(ids, others)
    return None if shared == len(ids) == len(others) else shared


def _lossless(runs: Sequence[Record]) -> bool | None:
    """Return whether rounding alone explains the outputs that differ; None where none does."""
    found = [run["lossless"] for run in runs if run["sampling"] != FASTEST and run.get("lossless") is not None]
    return all(found) if found else None


def _present(runs: Sequence[Record], name: str) -> list[float]:
    return [run[name] for run in runs if run.get(name) is not None]


def _median(runs: Sequence[Record], name: str) -> float | None:
    return median(values) if (values := _present(runs, name)) else None


def _medians(runs: Sequence[Record], name: str) -> dict[str, float]:
    keys = dict.fromkeys(key for run in runs for key in run[name])
    return {key: median(run[name][key] for run in runs if key in run[name]) for key in keys}
