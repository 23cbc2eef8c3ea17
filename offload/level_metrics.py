"""Metrics of speculation, from the statistics of its levels."""

from collections.abc import Sequence
from typing import Any

from .events import LevelStatistics, MaskStatistics

FULL = "full"  # the verifier of the top level


def tokens_per_verification(levels: Sequence[LevelStatistics]) -> float | None:
    """Return the mean tokens per verification: the accepted ones and one more. None without a verification."""
    top = [row for row in levels if row.verifier == FULL]
    passes = sum(row.verifications for row in top)
    return 1 + sum(row.accepted for row in top) / passes if passes else None


def speculation_metrics(levels: Sequence[LevelStatistics], masks: MaskStatistics | None) -> dict[str, Any]:
    """Return the fields of a `Summary` that follow from the levels' statistics and a constraint's masks."""
    top = [row for row in levels if row.verifier == FULL]
    pairs = {f"{row.drafter} -> {row.verifier}": row for row in levels}
    drafted = [row for row in top if row.drafted]  # without plain steps
    cycles = sum(row.verifications for row in drafted)
    return {
        "verifications": sum(row.verifications for row in top) or None,
        "acceptance": {pair: row.acceptance for pair, row in pairs.items() if row.acceptance is not None},
        "accepted_of_drafted": {pair: row.accepted_of_drafted for pair, row in pairs.items() if row.drafted},
        "time_share": _time_share(levels, masks),
        "trees": {pair: row.trees.means() for pair, row in pairs.items() if row.trees is not None},
        "cycle_s": sum(row.draft_s + row.verify_s for row in drafted) / cycles if cycles else None,
    }


def _time_share(levels: Sequence[LevelStatistics], masks: MaskStatistics | None) -> dict[str, float]:
    """Return the shares of the decoding time: "draft", "middle" and "verify"; {} if there was none.

    With masks also "masks", which are a part of the others. A level's draft_s includes all levels below it, so the top
    level's sum is the total. The time of neither verifier was spent on drafts.
    """
    top = [row for row in levels if row.verifier == FULL]
    total = sum(row.draft_s + row.verify_s for row in top)
    if total <= 0:
        return {}
    verify = sum(row.verify_s for row in top)
    middle = sum(row.verify_s for row in levels if row.verifier != FULL)
    shares = {"draft": max(total - verify - middle, 0.0) / total, "middle": middle / total, "verify": verify / total}
    return shares if masks is None else shares | {"masks": masks.seconds / total}
