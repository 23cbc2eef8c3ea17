"""Verification of token trees: which path is accepted, and which token follows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ...settings.tree_settings import TreeSampling
from ..sampling.transfers import upload
from ..sampling.warp import draw, read_tokens, sample, uniform
from .tree import ROOT, Tree, Verdict, tree_of
from .without_replacement import Siblings


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
