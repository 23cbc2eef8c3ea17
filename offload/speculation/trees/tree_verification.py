"""Draw the children of a tree's nodes, and verify them: with or without replacement, or the likeliest ones."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ...memory.host_memory import upload
from ...settings.tree_settings import TreeSampling
from ..sampling.warp import draw, read_tokens, sample, uniform
from .tree import ROOT, Tree, Verdict, tree_of


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


def verify_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    rows: Tensor | None,
    target: Tensor,
    generator: Generator | None,
    sampling: TreeSampling = TreeSampling.WITHOUT_REPLACEMENT,
) -> Verdict:
    """Return the accepted path, and the token that follows it.

    From the root down, a node's children are tried in order. The first accepted one is the next node; if there is none,
    a token drawn from the residual ends the path, and after a node without children, one drawn from the target. The
    tokens that come out are distributed as if each had been drawn from the target. The result comes to the host by one
    copy. A GPU tries the first children of all nodes at once, then the second ones, and so on; a CPU tries only those
    of the path.

    Args:
        tokens, parents: the tree, as in `tree`. Siblings differ, unless they were drawn with replacement.
        rows: the drafter's distributions, `[nodes + 1, vocab]`: row 0 after the sequence, row i + 1 after node i; those
            after nodes without children are not read. None: every token is tried as if it had been certain.
        target: the target's distributions, `[nodes + 1, vocab]`, in the same order.
        sampling: how the children were drawn from `rows`. The rows of `TOP_K` are not read.

    Raises:
        TriforceError: if a row of `target` is NaN.
    """
    if not tokens:
        return Verdict([], sample(target[0], generator))
    tree = tree_of(parents)
    drawn = upload(torch.tensor(tokens), target.device)
    chance = uniform(len(tokens), generator, target.device)
    if rows is None or sampling is TreeSampling.TOP_K:
        path, row = _try_certain(tree, drawn, target, chance)
    else:
        try_children = _try_on_the_way if target.device.type == "cpu" else _try_at_once
        path, row = try_children(tree, drawn, rows, target, chance, sampling)
    *path, token = read_tokens(torch.cat((path, draw(row, generator))), target)
    return Verdict([node for node in dict.fromkeys(path) if node != ROOT], token)


def _try_on_the_way(
    tree: Tree, drawn: Tensor, rows: Tensor, target: Tensor, chance: Tensor, sampling: TreeSampling
) -> tuple[Tensor, Tensor]:
    """Return the path and the distribution `[vocab]` of the token that follows it. Reads each decision on the host."""
    node, path = ROOT, []
    while children := tree.children[node + 1]:
        at = slice(node + 1, node + 2)
        siblings = Siblings(target[at], rows[at], sampling)
        for child in children:
            one = slice(child, child + 1)
            p, q = siblings.probabilities(drawn[one])
            if chance[one] * q < p:
                break
            siblings.reject(drawn[one])
        else:
            return torch.tensor(path, dtype=torch.long), siblings.p[0]
        node = child
        path.append(node)
    return torch.tensor(path, dtype=torch.long), target[node + 1]


def _try_at_once(
    tree: Tree, drawn: Tensor, rows: Tensor, target: Tensor, chance: Tensor, sampling: TreeSampling
) -> tuple[Tensor, Tensor]:
    """Return what `_try_on_the_way` returns, without a wait: the path's last node may occur in it several times."""
    families = _families(tree, target.device)
    siblings = Siblings(*(each.index_select(0, families.heads) for each in (target, rows)), sampling)
    rejected = torch.ones_like(families.children, dtype=torch.bool)
    for rank, count in enumerate(families.counts):
        children = families.children[:count, rank]
        tokens = drawn.index_select(0, children)
        p, q = siblings.probabilities(tokens)
        rejected[:count, rank] = chance.index_select(0, children) * q >= p
        siblings.reject(tokens)
    path = _follow(tree, families, rejected)
    last = path[-1:] + 1
    family = families.of_node.index_select(0, last)
    has_children = (family >= 0).to(target.dtype)
    residual = siblings.p.index_select(0, family.clamp(min=0))[0]
    return path, target.index_select(0, last)[0].lerp_(residual, has_children)


def _try_certain(tree: Tree, drawn: Tensor, target: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_try_at_once` returns, for drafts whose distributions are one-hot.

    The residual after a rejection is p without the token, so the k-th child is accepted with probability
    p(x_k) / (1 - p(x_1) - ... - p(x_(k-1))).
    """
    families = _families(tree, target.device)
    is_child = families.children >= 0
    children = torch.where(is_child, families.children, families.children[:, :1])  # padded with the first child
    tokens = drawn[children]
    p = target[families.heads.unsqueeze(1), tokens].double() * is_child
    left = (1 - p.cumsum(1) + p).clamp_(min=0)
    path = _follow(tree, families, chance[children] * left >= p)
    last = path[-1:] + 1
    row = target.index_select(0, last)[0]
    family = families.of_node.index_select(0, last)
    tokens = tokens.index_select(0, family.clamp(min=0))[0]
    residual = row.index_copy(0, tokens, row.index_select(0, tokens) * (family < 0))
    return path, residual + row * (residual.amax() == 0)  # nothing else is left, but for rounding


class _Families(NamedTuple):
    """The nodes that have children, those with the most first; on the device.

    `heads` `[families]` are these nodes plus 1, `children` `[families, most]` theirs, padded with -1, and `counts` how
    many have a first child, a second one, and so on. `of_node` `[nodes + 1]` is the family that a node heads, or -1.
    """

    heads: Tensor
    children: Tensor
    counts: list[int]
    of_node: Tensor


@lru_cache(maxsize=64)
def _families(tree: Tree, device: torch.device) -> _Families:
    heads = sorted(
        (head for head, children in enumerate(tree.children) if children), key=lambda head: -len(tree.children[head])
    )
    sizes = [len(tree.children[head]) for head in heads]
    padded = [tree.children[head] + [-1] * (sizes[0] - size) for head, size in zip(heads, sizes, strict=True)]
    counts = [sum(size > rank for size in sizes) for rank in range(sizes[0])]
    of_node = torch.full((len(tree) + 1,), -1)
    of_node[heads] = torch.arange(len(heads))
    heads, padded, of_node = (upload(torch.as_tensor(each), device) for each in (heads, padded, of_node))
    return _Families(heads, padded, counts, of_node)


def _follow(tree: Tree, families: _Families, rejected: Tensor) -> Tensor:
    """Return the path along accepted children, `[depth + 1]`, on the device; its last node is repeated.

    `rejected` `[families, most]` is True where there is no child.
    """
    rank = rejected.long().cumprod(1).sum(1, keepdim=True)  # of the first one that is not rejected
    # A node whose children are all rejected is its own successor, as is one that has none.
    successors = torch.cat((families.children + 1, families.heads.unsqueeze(1)), dim=1).gather(1, rank).squeeze(1)
    following = torch.arange(len(tree) + 1, device=rejected.device).index_copy_(0, families.heads, successors)
    path = [torch.zeros(1, dtype=torch.long, device=rejected.device)]
    for _ in range(tree.depth):
        path.append(following.index_select(0, path[-1]))
    return torch.cat(path) - 1
