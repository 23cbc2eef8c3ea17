"""Verification of drafts: which tokens are accepted, and which one follows them. One law for chains and trees.

At each node, from the root down, its children are tried in order against the target's distribution p. A child x that
was drawn from q is accepted with probability min(1, p(x) / q(x)), and is the next node. After a rejection p becomes the
residual norm(max(p - q, 0)), and, if the children differ, q loses x and is normalised. Where no child is accepted, a
token drawn from p ends the path. Proof obligation: the tokens that come out are distributed as if each had been drawn
from the target.

With one child a node, this is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318);
with several, SpecInfer's (arXiv 2305.09781) if they are drawn with replacement, and Sequoia's (arXiv 2402.12374,
Algorithm 2) if without.

Coupled sampling: the token at a position is the one that the noise picks from the target's distribution, whatever was
drafted; a drafted token is accepted if it is that one (Daliri et al., arXiv 2408.07978). It does not depend on the
drafter's distribution.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from ...memory.host_memory import upload
from ...settings.tree_settings import TreeSampling
from ..sampling.warp import draw, read_tokens, sample, uniform
from .tree import ROOT, Draft, Verdict, chain, tree_of


def draw_children(rows: Tensor, count: int, generator: Generator | None, sampling: TreeSampling) -> Tensor:
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


def verify(
    draft: Draft,
    target: Tensor,
    generator: Generator | None,
    sampling: TreeSampling = TreeSampling.WITHOUT_REPLACEMENT,
) -> Verdict:
    """Return the accepted path of a draft, and the token that follows it.

    The first children of all nodes are compared at once. Only a rejection reads a whole row, and waits for the device
    before a further child is tried.

    Args:
        target: the target's distributions p, `[nodes + 1, vocab]`: after the sequence, and after each node.
        sampling: how the children of a tree were drawn from the draft's rows. The rows of `TOP_K` are not read.

    Raises:
        TriforceError: if a row of `target` is NaN.
    """
    if not draft.tokens:
        return Verdict([], sample(target[0], generator))
    is_tree = draft.parents is not None
    rows = None if is_tree and sampling is TreeSampling.TOP_K else draft.rows
    tree = tree_of(draft.parents if draft.parents is not None else chain(len(draft.tokens)))
    drawn, above = upload(torch.tensor((draft.tokens, tree.parents)), target.device)
    p = target[above + 1, drawn]
    q = torch.ones_like(p) if rows is None else rows[above + 1, drawn]
    trials = list(zip(*torch.stack((uniform(len(p), generator, p.device), p, q)).tolist(), strict=True))
    path: list[int] = []
    node, row = ROOT, target[0]
    while children := tree.children[node + 1]:
        if rows is None:
            child, row = _try_certain(children, draft.tokens, trials, row)
        else:
            child, row = _try_drawn(children, draft.tokens, trials, row, rows[node + 1], sampling)
        if child is None:
            break
        path.append(child)
        node, row = child, target[child + 1]
    return Verdict(path, read_tokens(draw(row, generator), target)[0])


Trial = tuple[float, float, float]  # of a node: a random number in [0, 1), and p and q of its token as first child


def _try_drawn(
    children: Sequence[int],
    tokens: Sequence[int],
    trials: Sequence[Trial],
    p: Tensor,
    q: Tensor,
    sampling: TreeSampling,
) -> tuple[int | None, Tensor]:
    """Return the accepted child of a node, or None, and p `[vocab]` after the rejections before, not normalised."""
    untried = q
    for rank, child in enumerate(children):
        chance, p_child, q_child = trials[child]
        if rank:
            p = p / p.sum()
            if sampling is TreeSampling.WITHOUT_REPLACEMENT:
                untried, q = _without(untried, tokens[children[rank - 1]], rank)
            p_child, q_child = torch.stack((p[tokens[child]], q[tokens[child]])).tolist()
        if chance * q_child < p_child:
            return child, p
        p = residual(p, q)
    return None, p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return max(p - q, 0) `[vocab]`, not normalised; p where that is zero, because p equals q but for rounding."""
    difference = (p - q).clamp_(min=0)
    # A product with 0 or 1 chooses: on a CPU, it is several times faster than torch.where.
    return difference.addcmul_(p, (difference.amax() == 0).to(p.dtype))


def _without(untried: Tensor, token: int, tried: int) -> tuple[Tensor, Tensor]:
    """Return q without a tried token, and normalised: uniform over the untried tokens if nothing is left of it."""
    untried = untried.index_fill(0, torch.tensor([token], device=untried.device), 0)
    mass = untried.sum()
    is_used_up = (mass == 0).to(untried.dtype)
    # Uniform over all tokens, tried ones too: neither are these tried again, nor is anything left of their p.
    return untried, untried / (mass + is_used_up) + is_used_up / max(len(untried) - tried, 1)


def _try_certain(
    children: Sequence[int], tokens: Sequence[int], trials: Sequence[Trial], p: Tensor
) -> tuple[int | None, Tensor]:
    """Return what `_try_drawn` returns, of different children whose distributions were one-hot.

    The residual is p without the rejected tokens, so a child x is accepted with probability p(x) / (1 - p(rejected)).
    """
    left = 1.0
    for child in children:
        chance, p_child, _ = trials[child]
        if chance * left < p_child:
            return child, p
        left = max(left - p_child, 0.0)
    rest = p.index_fill(0, upload(torch.tensor([tokens[child] for child in children]), p.device), 0)
    return None, rest.addcmul_(p, (rest.amax() == 0).to(p.dtype))  # nothing else is left, but for rounding


def verify_choices(drafted: Sequence[int], picks: Sequence[int], parents: Sequence[int] | None = None) -> Verdict:
    """Return the path that the target's choices accept, and the token that follows: of coupled sampling and greedy.

    Args:
        drafted: the tokens of the draft.
        picks: the tokens that the target's rows give: after the sequence, and after each node. With
            coupled sampling, the noise is that of the position which follows.
        parents: the index of each node's parent, before the node's own; -1 is the sequence's end. None is a chain.
            Siblings' tokens differ.
    """
    parents = range(-1, len(drafted) - 1) if parents is None else parents
    path, node = [], ROOT
    for index, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
        if parent == node and token == picks[node + 1]:
            path.append(index)
            node = index
    return Verdict(path, picks[node + 1])
