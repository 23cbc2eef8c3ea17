"""The report of `bench --quality`: what was measured of each mode, as rows and as JSON. Imports no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from offload.evaluation import (
    NeedleScore,
    TextScores,
    equal_tokens,
    mean_divergence,
    perplexities,
    perplexity,
    top1_agreement,
)

from ...output.format import rounded

PARTS = 8  # of the scored tokens, whose perplexities are given one by one


@dataclass(frozen=True, slots=True)
class ModeQuality:
    """What was measured of a mode.

    `output` are the tokens of greedy decoding after the text; `weights_bytes` and `kv_bytes` are estimates, `prefill_s`
    the seconds of reading the text.
    """

    mode: str
    scores: TextScores
    output: tuple[int, ...]
    needles: tuple[NeedleScore, ...]
    weights_bytes: int
    kv_bytes: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The modes that were measured, the exact one first. `facts` describe the machine and the request."""

    facts: Mapping[str, Any]
    modes: Sequence[ModeQuality]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each mode."""
        return [_row(each, self.modes[0]) for each in self.modes]

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        """Return everything, with the score of every token."""
        raw = {each.mode: rounded({"log_probs": each.scores.log_probs.tolist()}) for each in self.modes}
        outputs = {each.mode: {"output": list(each.output)} for each in self.modes}
        modes = [rounded(row) | raw[row["mode"]] | outputs[row["mode"]] for row in self.rows()]
        exact = {"settings": self.facts["settings"]}
        return {"type": "quality", "interrupted": interrupted, **rounded(self.facts), **exact, "modes": modes}


def _row(one: ModeQuality, exact: ModeQuality) -> dict[str, Any]:
    placed = [needle for needle in one.needles if needle.depth is not None]
    absent = [needle.log_prob for needle in one.needles if needle.depth is None]
    by_position = perplexities(one.scores.log_probs, PARTS)
    return {
        "mode": one.mode,
        "perplexity": perplexity(one.scores.log_probs),
        "perplexity_by_position": [{"from": first, "to": end, "perplexity": each} for first, end, each in by_position],
        "kl": 0.0 if one is exact else mean_divergence(one.scores),
        "top1_agreement": top1_agreement(exact.scores, one.scores),
        "equal_tokens": equal_tokens(exact.output, one.output),
        "needles_found": sum(needle.found for needle in placed) if placed else None,
        "needle_log_prob": mean(needle.log_prob for needle in placed) if placed else None,
        "needle_log_prob_absent": absent[0] if absent else None,
        "needles": [asdict(needle) for needle in placed],
        "token_s": float(one.scores.seconds.median()),
        "prefill_s": one.prefill_s,
        "weights_bytes": one.weights_bytes,
        "kv_bytes": one.kv_bytes,
    }
