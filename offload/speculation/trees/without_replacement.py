"""The children of a tree's nodes: how they are drawn, and what is left of the distributions after a rejection.

Without replacement: Sequoia (Chen et al., arXiv 2402.12374, Algorithm 2). With replacement: the multi-step speculative
sampling of SpecInfer (Miao et al., arXiv 2305.09781, Algorithm 2).
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ...settings.tree_settings import TreeSampling


def draw_children(rows: Tensor, count: int, generator: Generator, sampling: TreeSampling) -> Tensor:
    """Return the children of nodes, in order: `[nodes, count]` tokens, on the device.

    Without replacement, an exponential race decides: its first arrivals are draws without replacement, in order. Tokens
    of probability 0 arrive after all others, in random order: uniform over the untried, where a row is used up.

    Args:
        rows: the drafter's distributions after the nodes, `[nodes, vocab]`. For `TOP_K`, anything that ranks the tokens
            alike, such as logits: at temperature 0, where the distributions are one-hot, they name one child alone.
        count: of children, at most the vocabulary unless they are drawn with replacement.
    """
    if sampling is TreeSampling.TOP_K:
        return rows.topk(count, dim=-1).indices
    if sampling is TreeSampling.WITH_REPLACEMENT:
        noise = rows.new_empty(len(rows), count, rows.shape[1]).exponential_(generator=generator)
        return torch.div(rows.unsqueeze(1), noise, out=noise).argmax(dim=-1)
    noise = torch.empty_like(rows).exponential_(generator=generator)
    arrival = torch.where(rows > 0, rows / noise, -noise)
    return arrival.topk(count, dim=-1).indices


class Siblings:
    """Distributions at nodes whose children are tried one after another, a child of every node at a time.

    If the children of some nodes are used up, these leave: nodes stand in the order of their number of children, the
    most first, so that those that stay are the first ones.

    Attributes:
        p: what the next token must follow, `[nodes, vocab]`: at first the target, after a rejection the residual.
    """

    def __init__(self, p: Tensor, q: Tensor, sampling: TreeSampling) -> None:
        """`p` and `q` are the distributions of the target and of the drafter, `[nodes, vocab]`; they are unchanged."""
        self.p = p.clone()
        self._q = q
        self._untried = q.clone() if sampling is TreeSampling.WITHOUT_REPLACEMENT else None
        self._tried = 0

    def probabilities(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return p and q of the next children, `[n]` each, for the first n nodes, whose next children are `tokens`.

        A child is accepted with probability min(1, p / q).
        """
        index = tokens.unsqueeze(1)
        p, q = (rows[: len(tokens)].gather(1, index).squeeze(1) for rows in (self.p, self._q))
        return p, q

    def reject(self, tokens: Tensor) -> None:
        """Go on after the rejection of the next children, `[n]`, of the first n nodes.

        p becomes norm(max(p - q, 0)). Without replacement, q loses the token and is normalised; if nothing is left of
        it, it becomes uniform over the untried tokens.
        """
        count = len(tokens)
        p, q = self.p[:count], self._q[:count]
        residual = (p - q).clamp_(min=0)
        mass = residual.sum(dim=-1, keepdim=True)
        is_zero = (mass == 0).to(p.dtype)  # p equals q but for rounding
        self.p[:count] = residual.addcmul_(p, is_zero).div_(mass + is_zero)
        self._tried += 1
        if self._untried is not None:
            self._q = self._renormalised(tokens)

    def _renormalised(self, tokens: Tensor) -> Tensor:
        untried = self._untried[: len(tokens)].scatter_(1, tokens.unsqueeze(1), 0)
        mass = untried.sum(dim=-1, keepdim=True)
        used_up = (mass == 0).to(untried.dtype)
        # Uniform over all tokens, tried ones too: neither are these tried again, nor is anything left of their p.
        uniform = used_up / max(untried.shape[1] - self._tried, 1)
        return untried / (mass + used_up) + uniform
