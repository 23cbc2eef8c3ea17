"""Metrics of speculation, from the statistics of its levels."""

from collections.abc import Sequence
from typing import Any

from .events import LevelStatistics

FULL = "full"  # the verifier of the top level


def verifications(levels: Sequence[LevelStatistics]) -> int:
    """Return the number of passes over the full KV cache."""
    return sum(row.verifications for row in _over_full(levels))


def tokens_per_verification(levels: Sequence[LevelStatistics]) -> float | None:
    """Return the mean tokens per verification: the accepted ones and one more. None without a verification."""
    passes = verifications(levels)
    return 1 + sum(row.accepted for row in _over_full(levels)) / passes if passes else None


def acceptance(levels: Sequence[LevelStatistics]) -> dict[str, float]:
    """Return acceptance rates a token by "drafter -> verifier", without pairs that verified no token."""
    return {f"{row.drafter} -> {row.verifier}": row.acceptance for row in levels if row.acceptance is not None}


def accepted_of_drafted(levels: Sequence[LevelStatistics]) -> dict[str, float]:
    """Return the accepted share of all drafted tokens likewise."""
    rates = {f"{row.drafter} -> {row.verifier}": row.accepted_of_drafted for row in levels}
    return {pair: rate for pair, rate in rates.items() if rate is not None}


def trees(levels: Sequence[LevelStatistics]) -> dict[str, dict[str, Any]]:
    """Return what trees there were, by "drafter -> verifier": {} if all drafts were chains.

    `verifications` counts them; `nodes`, `depth` and `accepted_depth` are means; `child_acceptance` is that of the k-th
    child of a node that a verification has reached.
    """
    return {
        f"{row.drafter} -> {row.verifier}": {
            "verifications": row.trees.verifications,
            "nodes": row.trees.nodes / row.trees.verifications,
            "depth": row.trees.depth / row.trees.verifications,
            "accepted_depth": row.trees.accepted / row.trees.verifications,
            "child_acceptance": row.trees.child_acceptance,
        }
        for row in levels
        if row.trees is not None
    }


def time_share(levels: Sequence[LevelStatistics], masks_s: float | None = None) -> dict[str, float]:
    """Return the shares of the decoding time: "draft", "middle" and "verify"; {} if there was none.

    With `masks_s`, the seconds of a constraint's masks, also "masks", which are a part of the others.

    A level's draft_s includes all levels below it, so the top level's sum is the total. The time of neither verifier
    was spent on drafts.
    """
    full = _over_full(levels)
    total = sum(row.draft_s + row.verify_s for row in full)
    if total <= 0:
        return {}
    verify = sum(row.verify_s for row in full)
    middle = sum(row.verify_s for row in levels if row.verifier != FULL)
    shares = {"draft": max(total - verify - middle, 0.0) / total, "middle": middle / total, "verify": verify / total}
    return shares if masks_s is None else shares | {"masks": masks_s / total}


def cycle_seconds(levels: Sequence[LevelStatistics]) -> float | None:
    """Return the mean seconds of a draft and its verification over the full KV cache; None where nothing was drafted.

    Plain steps are not among them.
    """
    drafted = [row for row in _over_full(levels) if row.drafted]
    count = sum(row.verifications for row in drafted)
    return sum(row.draft_s + row.verify_s for row in drafted) / count if count else None


def _over_full(levels: Sequence[LevelStatistics]) -> list[LevelStatistics]:
    return [row for row in levels if row.verifier == FULL]
