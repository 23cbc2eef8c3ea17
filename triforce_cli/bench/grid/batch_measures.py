"""What a run of a grid measures; of a batch, from the summaries of its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from offload.metrics import Summary

from ..batch_report import BatchSample

MEASURED = ("tokens_per_s", "tbt_median_s", "tbt_p95_s", "tokens_per_verification", "verifications", "acceptance")
MEASURED += ("time_share", "total_s")


def of_batch(summaries: Sequence[Summary], sample: BatchSample) -> dict[str, Any]:
    """Return the measures of a batch by name: the rate of all together, sums, and means over the sequences."""
    found = {name: [getattr(each, name) for each in summaries] for name in MEASURED}
    means = {name: _mean(found[name]) for name in ("tbt_median_s", "tbt_p95_s", "tokens_per_verification")}
    shared = {name: _by_key(found[name]) for name in ("acceptance", "time_share")}
    passes = [each for each in found["verifications"] if each is not None]
    more = {"tokens_per_s": sample.tokens_per_s, "total_s": sample.total_s, "verifications": sum(passes) or None}
    return {name: (means | shared | more)[name] for name in MEASURED}


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return mean(present) if present else None


def _by_key(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: mean(part[key] for part in parts if key in part) for key in keys}
