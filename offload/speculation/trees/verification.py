"""Verification of drafts: which tokens are accepted, and which one follows them.

Speculative sampling: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ...settings.tree_settings import TreeSampling
from ..sampling.transfers import upload
from ..sampling.warp import draw, read_tokens, sample, uniform
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
