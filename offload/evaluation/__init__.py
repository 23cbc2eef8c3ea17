"""How well a model continues a text: perplexity, agreement with another run of it, and the needle test.

For modes that change the answer: rounded weights, quantised or dropped keys and values. Nothing here knows which. A
baseline that is no way to decode is here as well: the sliding window with recomputation. And how much of the attention
the selections of the middle level keep.
"""

from .attention import Policy, recovered_attention
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
    "Needle",
    "NeedleScore",
    "Policy",
    "Predictor",
    "Recomputed",
    "TextScores",
    "continue_greedily",
    "equal_tokens",
    "make_needles",
    "mean_divergence",
    "perplexities",
    "perplexity",
    "recovered_attention",
    "score_needle",
    "score_text",
    "top1_agreement",
]
