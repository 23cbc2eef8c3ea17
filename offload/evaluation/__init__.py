"""How well a model continues a text: perplexity, agreement with another run of it, and the needle test.

For modes that change the answer: rounded weights, quantised or dropped keys and values. Nothing here knows which. A
baseline that is no way to decode is here as well: the sliding window with recomputation. And how much of the attention
the selections of the middle level keep, and on how few tokens it falls.
"""

from .attention import Policy, recovered_attention
from .heavy_hitters import Concentration, concentration, heaviest, mean_map, score_masked
from .needles import Needle, NeedleScore, make_needles, score_needle
from .teacher_forcing import (
    Predictor,
    Recomputed,
    TextScores,
    continue_greedily,
    equal_tokens,
    mean_divergence,
    perplexities,
    perplexity,
    score_text,
    top1_agreement,
)

__all__ = [
    "Concentration",
    "Needle",
    "NeedleScore",
    "Policy",
    "Predictor",
    "Recomputed",
    "TextScores",
    "concentration",
    "continue_greedily",
    "equal_tokens",
    "heaviest",
    "make_needles",
    "mean_divergence",
    "mean_map",
    "perplexities",
    "perplexity",
    "recovered_attention",
    "score_masked",
    "score_needle",
    "score_text",
    "top1_agreement",
]
