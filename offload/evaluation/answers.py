"""The probability of each answer that a constraint allows, such as of each of several choices."""

import json
from collections.abc import Collection, Sequence

from torch import float64

from ..constraints.masks import TokenMasks
from ..sequence import TokenSequence
from ..settings.constraint import CHOICES, Constraint
from ..speculation.passes.runner import Runner
from ..speculation.sampling.warp import read_tokens

_LEAST = 1e-9  # rarer beginnings of answers are left out: most are odd spellings in single letters


def most_tokens(constraint: Constraint) -> int:
    """Return how many tokens an answer has at most, as a token has a byte at least: those of the longest choice."""
    texts = json.loads(constraint.text) if constraint.kind == CHOICES else [constraint.text]
    return max(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def answer_chances(
    runner: Runner, prompt: Sequence[int], masks: TokenMasks, ends: Collection[int]
) -> dict[tuple[int, ...], float]:
    """Return the tokens of each answer after a prompt, and the probability with which it is sampled at temperature 1.

    It is exact: a pass for each beginning after which answers part. The language must be finite, and small. The same
    text in other tokens is another answer. The `masks` are those at the beginning of an answer; `ends` end it. Raises
    TriforceError for logits that are no numbers.
    """
    for _ in runner.prefill(TokenSequence(prompt)):
        pass  # what is in the cache is not run again
    found: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        path, chance = waiting.pop()
        mask = masks.allowed(path)
        allowed = [] if mask is None else mask.nonzero()[0].tolist()
        shares = dict.fromkeys(allowed, 1.0)
        if len(allowed) > 1 and not all(token in ends for token in allowed):
            logits = runner.model.logits(runner.rows(TokenSequence([*prompt, *path])))
            probs = masks.apply(logits, [path]).to(float64).softmax(-1)
            read_tokens(probs.argmax(-1), probs)  # raises for NaN
            shares = dict(zip(allowed, probs[0, allowed].tolist(), strict=True))
        ended = [share for token, share in shares.items() if token in ends]
        if ended:
            found[path] = chance * min(sum(ended), 1.0)
        waiting += [
            ((*path, token), chance * share)
            for token, share in shares.items()
            if token not in ends and chance * share > _LEAST
        ]
    return found
