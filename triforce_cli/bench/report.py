"""The report of a benchmark: medians of the samples, as rows and as JSON. Imports neither engine nor terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from offload.metrics import Summary

from ..output.format import rounded
from .methods import BASE
from .noise import spread

_COMMON = ("ttft_s", "tbt_median_s", "tbt_p95_s", "tokens_per_s", "tokens_per_verification")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a method: its summary, the time of every token after the first, and the tokens."""

    summary: Summary
    tbt_s: Sequence[float]
    ids: tuple[int, ...]


@dataclass(slots=True)
class MethodRuns:
    """All runs of one method so far; `memory_bytes` is its KV caches and draft model, without the model's weights.

    `lossless`: whether rounding alone explains outputs that differ from plain decoding's; None if none differ.
    """

    method: str
    memory_bytes: int
    samples: list[Sample] = field(default_factory=list)
    lossless: bool | None = None

    def medians(self) -> dict[str, Any]:
        """Return the median over the runs of each number that they have."""
        found = {name: _median(getattr(sample.summary, name) for sample in self.samples) for name in _COMMON}
        found["nodes"] = _median(_mean_nodes(sample.summary) for sample in self.samples)
        for name in ("acceptance", "time_share"):
            runs = [getattr(sample.summary, name) for sample in self.samples]
            keys = dict.fromkeys(key for run in runs for key in run)
            found[name] = {key: median(run[key] for run in runs if key in run) for key in keys}
        return found

    @property
    def rates(self) -> list[float]:
        """The tokens per second of each run that has them."""
        rates = (sample.summary.tokens_per_s for sample in self.samples)
        return [rate for rate in rates if rate]

    def speedups(self, base: MethodRuns) -> tuple[float, float] | None:
        """Return the smallest and the largest speed-up of a run over the run of `base` in the same round.

        None for fewer than two rounds.
        """
        ratios = [rate / plain for rate, plain in zip(self.rates, base.rates, strict=False)]
        return (min(ratios), max(ratios)) if len(ratios) > 1 else None

    def differs_at(self, ids: Sequence[int]) -> int | None:
        """Return the first token, counted from 0, in which any run differs from these; None if none does."""
        positions = [first_difference(sample.ids, ids) for sample in self.samples]
        return min((position for position in positions if position is not None), default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of all methods, plain decoding first. `facts` describe the machine and the request.

    Outputs are compared only if they are `comparable`: greedy or by coupled sampling. `other_load` is in cores, None
    where it was not measured.
    """

    facts: Mapping[str, Any]
    comparable: bool
    methods: Sequence[MethodRuns]
    other_load: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each method; `speedup` is relative to plain decoding.

        `speedup_range` and `spread` are None for a single run.
        """
        done = [one for one in self.methods if one.samples]
        base = next((one for one in done if one.method == BASE), None)
        rows = []
        for one in done:
            row = {"method": one.method, "repeats": len(one.samples)} | one.medians()
            rate, plain = row["tokens_per_s"], base and base.medians()["tokens_per_s"]
            row["speedup"] = rate / plain if rate and plain else None
            row["speedup_range"] = one.speedups(base) if base else None
            row["spread"] = spread(one.rates)
            row["memory_bytes"] = one.memory_bytes
            row["differs_at"] = one.differs_at(base.samples[0].ids) if base and self.comparable else None
            row["equals_ar"] = row["differs_at"] is None if base and self.comparable else None
            row["lossless"] = one.lossless
            rows.append(row)
        return rows

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        """Return everything, with the raw samples."""
        runs = {one.method: [_raw(sample) for sample in one.samples] for one in self.methods}
        methods = [row | {"runs": runs[row["method"]]} for row in self.rows()]
        exact = {"settings": self.facts["settings"]}
        found = self.facts | {"other_load_cores": self.other_load, "methods": methods}
        return {"type": "bench", "interrupted": interrupted, **rounded(found), **exact}


def _mean_nodes(summary: Summary) -> float | None:
    """Return the nodes of a tree, over all drafters; None without trees."""
    counts = [(each["verifications"], each["nodes"]) for each in summary.trees.values()]
    return sum(count * nodes for count, nodes in counts) / sum(count for count, _ in counts) if counts else None


def _median(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first position at which token ids differ, or one of the two ends; None for equal ones."""
    for position, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return position
    return None if len(ids) == len(others) else min(len(ids), len(others))


def _raw(sample: Sample) -> dict[str, Any]:
    summary = asdict(sample.summary)
    names = (*_COMMON, "verifications", "acceptance", "time_share", "total_s")
    return {name: summary[name] for name in names} | {"tbt_s": list(sample.tbt_s), "tokens": list(sample.ids)}
