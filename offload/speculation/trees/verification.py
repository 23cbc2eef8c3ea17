"""Verification of drafts: which tokens are accepted, and which one follows them.

Speculative sampling: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.

Coupled sampling: the token at a position is the one that the noise picks from the target's distribution, whatever was
drafted; a drafted token is accepted if it is that one (Daliri et al., arXiv 2408.07978). It does not depend on the
drafter's distribution.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from ...memory.host_memory import upload
from ...settings.config import Sampling
from ...settings.tree_settings import TreeSampling
from ..sampling.noise import Noise
from ..sampling.warp import draw, read_tokens, sample, uniform, warp
from .tree import Draft, Verdict
from .tree_verification import verify_tree


def verify(draft: Draft, target: Tensor, generator: Generator | None) -> tuple[int, int]:
    """Return how many tokens of the draft are accepted, and the token that follows them.

    Token x drawn from q is accepted with probability min(1, p(x) / q(x)). The first one that is not is replaced by a
    token drawn from the residual norm(max(p - q, 0)); if all are accepted, one more is drawn from the last row. The
    tokens that come out are distributed as if each had been drawn from p. All of it is computed on the device; the
    result comes to the host by one copy.

    Args:
        draft: tokens and the distributions q that they were drawn from.
        target: the distributions p, `[tokens + 1, vocab]`.

    Raises:
        TriforceError: if a row of `target` is NaN.
    """
    if not draft.tokens:
        return 0, sample(target[0], generator)
    drawn = upload(torch.tensor(draft.tokens), target.device)
    accepted = _accepted(drawn, draft.rows, target, generator)
    row = target.index_select(0, accepted)[0]
    token = draw(residual(row, drawn, draft.rows, accepted), generator)
    count, following = read_tokens(torch.cat((accepted, token)), target)
    return count, following


def _accepted(drawn: Tensor, rows: Tensor | None, target: Tensor, generator: Generator | None) -> Tensor:
    """Return how many of the drawn tokens are accepted, `[1]`: those before the first one that is rejected."""
    p = target[:-1].gather(1, drawn.unsqueeze(1)).squeeze(1)
    q = torch.ones_like(p) if rows is None else rows.gather(1, drawn.unsqueeze(1)).squeeze(1)
    chance = uniform(len(drawn), generator, target.device)
    rejected = chance * q >= p
    return rejected.logical_not().long().cumprod(0).sum(0, keepdim=True)


def residual(row: Tensor, drawn: Tensor, rows: Tensor | None, index: Tensor) -> Tensor:
    """Return max(p - q, 0) `[vocab]`, not normalised, for the rejected token number `index` `[1]` of the draft.

    If `index` is the number of `drawn` tokens, none was rejected, and the row p is returned.
    """
    last = len(drawn) - 1
    is_rejected, index = index <= last, index.clamp(max=last)
    if rows is None:
        token = drawn.index_select(0, index)
        return row.index_copy(0, token, row.index_select(0, token) * is_rejected.logical_not())
    # Products with 0 or 1 choose: on a CPU, they are several times faster than torch.where and any.
    difference = row.addcmul(rows.index_select(0, index)[0], is_rejected.to(row.dtype), value=-1).clamp_(min=0)
    is_zero = difference.amax() == 0  # p equals q but for rounding
    return difference.addcmul_(row, is_zero.to(row.dtype))


def verify_draft(draft: Draft, target: Tensor, generator: Generator | None, sampling: TreeSampling) -> Verdict:
    """Return what `verify` accepts of a chain, or `verify_tree` of a tree whose children were drawn by `sampling`."""
    if draft.parents is not None:
        return verify_tree(draft.tokens, draft.parents, draft.rows, target, generator, sampling)
    accepted, token = verify(draft, target, generator)
    return Verdict(list(range(accepted)), token)


_SMALLEST_MARGIN, _STEPS = 1e-7, 20  # of the search for a margin


def verify_choices(drafted: Sequence[int], picks: Sequence[int], parents: Sequence[int] | None = None) -> Verdict:
    """Return what the target's choices accept of a draft, and the token that follows: of coupled sampling and greedy.

    Args:
        drafted: the tokens of the draft.
        picks: the tokens that the target's rows give: after the sequence, and after each node. What the noise picks,
            it picks for the position that follows.
        parents: the index of each node's parent, before the node's own; -1 is the sequence's end. None is a chain.
            Siblings' tokens differ.
    """
    parents = range(-1, len(drafted) - 1) if parents is None else parents
    path, node = [], -1
    for index, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
        if parent == node and token == picks[node + 1]:
            path.append(index)
            node = index
    return Verdict(path, picks[node + 1])


def draw_children_coupled(rows: Tensor, noise: Noise, position: int, count: int) -> Tensor:
    """Draw different tokens for one position from distributions `[nodes, vocab]`, on the device: `[nodes, count]`.

    The first is what `noise.pick` returns; the others are the likeliest to be what it picks from the target's.
    """
    return noise.best(rows, [position] * len(rows), count)


@dataclass(frozen=True, slots=True)
class CoupledChoice:
    """Plain decoding's choice of the token at a position, from penalised logits `[vocab]`, and how narrow it is."""

    sampling: Sampling
    noise: Noise
    position: int

    def pick(self, logits: Tensor, sampling: Sampling | None = None) -> int:
        """Return the chosen token."""
        probs = warp(logits.unsqueeze(0), sampling or self.sampling)
        return int(self.noise.pick(probs, [self.position]))

    def perturbed(self, logits: Tensor) -> Tensor:
        """Return the logits with Gumbel noise, up to a constant; -inf where top-k, top-p or min-p keep no token."""
        scores = self.noise.scores(warp(logits[None], self.sampling), [self.position])[0]
        return scores.log() * self.sampling.temperature

    def margin(self, logits: Tensor, expected: int, emitted: int) -> float:
        """Return by how much a logit must differ for `emitted` to be chosen, not `expected`; inf if none is enough.

        Where top-p and min-p end may move with all logits at once.
        """
        low, high = _SMALLEST_MARGIN, float(logits.max() - logits[emitted]) + 100 * self.sampling.temperature
        if not (math.isfinite(high) and self._chooses(logits, high, expected, emitted)):
            return math.inf
        for _ in range(_STEPS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._chooses(logits, middle, expected, emitted) else (middle, high)
        return high

    def _chooses(self, logits: Tensor, change: float, expected: int, emitted: int) -> bool:
        for sampling in self._moved(change / self.sampling.temperature):
            for token, difference in ((emitted, change), (expected, -change)):
                changed = logits.clone()
                changed[token] += difference
                if self.pick(changed, sampling) == emitted:
                    return True
        return False

    def _moved(self, change: float) -> Iterator[Sampling]:
        """Yield the sampling, and with top-p and min-p as they would be if all log probabilities changed so much."""
        p, min_p = self.sampling.top_p, self.sampling.min_p
        yield self.sampling
        if p < 1 or min_p > 0:
            for signed in (-change, change):
                moved = p + p * (1 - p) * signed
                yield replace(
                    self.sampling, top_p=min(max(moved, 1e-6), 1.0), min_p=min(min_p * math.exp(min(signed, 50.0)), 1.0)
                )
