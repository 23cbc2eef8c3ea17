"""Attention to a window of the newest keys, and attention with capped scores, by torch.

Rows either share products with a mask, or each is computed alone over the keys that it sees. Then a row has the same
bits in every pass: the native kernel's layers need that.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import Partial, attend, attend_masked

_TILE = 64  # rows that share a mask


class Limits(NamedTuple):
    """What the keys of a layer are limited by, beside causality.

    Attributes:
        window: the newest keys that a query sees, its own included; 0: all.
        cap: scores are `cap * tanh(score / cap)`; 0: they are as they are.
        by_row: whether a query's result must not depend on the others.
    """

    window: int = 0
    cap: float = 0.0
    by_row: bool = False


class Branches(NamedTuple):
    """The tokens of a tree in flight: their depths, and for each token of the pass, the last ones, its path."""

    depths: Tensor  # [nodes]
    sees: Tensor  # bool [nodes, nodes]
    paths: list[list[int]]


def attend_limited(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    limits: Limits,
    tree: Branches | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend causally; the last keys are those of the tokens in flight: the queries' own, or all of a tree's.

    q `[tokens, heads, head_dim]` of the last tokens in flight, keys and values `[kv_heads, keys, head_dim]`, rotated;
    returns as q. `lse` `[tokens, heads]`, if given, is filled with the log-sum-exp.
    """
    if limits.by_row or (len(q) == 1 and tree is None):
        parts = [_attend_row(q, keys, values, limits, tree, row) for row in range(len(q))]
    else:
        parts = [_attend_tile(q, keys, values, limits, tree, first) for first in range(0, len(q), _TILE)]
    if lse is not None:
        lse.copy_(torch.cat([part.lse for part in parts]))
    return torch.cat([part.out for part in parts]).to(q.dtype)


def _attend_row(q: Tensor, keys: Tensor, values: Tensor, limits: Limits, tree: Branches | None, row: int) -> Partial:
    """Attend with one query to the keys that it sees, in the order of their positions."""
    if tree is None:
        end = keys.shape[1] - len(q) + row + 1
        first = max(end - limits.window, 0) if limits.window else 0
        keys, values = keys[:, first:end], values[:, first:end]
    else:
        before, path = keys.shape[1] - len(tree.depths), tree.paths[row]
        every = torch.cat((torch.arange(before), before + torch.tensor(path))).to(keys.device)[-limits.window :]
        keys, values = keys[:, every], values[:, every]
    one = q[row : row + 1]
    return attend_masked(one, keys, values, None, limits.cap) if limits.cap else attend(one, keys, values)


def _attend_tile(q: Tensor, keys: Tensor, values: Tensor, limits: Limits, tree: Branches | None, row: int) -> Partial:
    """Attend with up to _TILE queries from number `row` on, with a mask over all keys that one of them sees."""
    some, count = q[row : row + _TILE], keys.shape[1]
    if tree is None:
        own = count - len(q) + row + torch.arange(len(some), device=q.device)  # positions of the queries' keys
        first = max(count - len(q) + row + 1 - limits.window, 0) if limits.window else 0
        at = torch.arange(first, count - len(q) + row + len(some), device=q.device)
        sees = at <= own.unsqueeze(1)
    else:
        before, first = count - len(tree.depths), 0
        at = torch.cat((torch.arange(before, device=q.device), before + tree.depths))
        nodes = len(tree.depths) - len(q) + row + torch.arange(len(some), device=q.device)
        own = at[before + nodes]
        every = torch.ones((len(some), before), dtype=torch.bool, device=q.device)
        sees = torch.cat((every, tree.sees[nodes]), dim=1)
    if limits.window:
        sees = sees & (at > own.unsqueeze(1) - limits.window)
    end = first + sees.shape[1]
    return attend_masked(some, keys[:, first:end], values[:, first:end], sees, limits.cap)
