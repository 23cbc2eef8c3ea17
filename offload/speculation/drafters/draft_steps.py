"""The passes that draft a tree, one for each depth; a chain has one node at each."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.host_memory import upload
from ...memory.tree_attention import ROOT, tree_of


class DraftStep(NamedTuple):
    """The nodes at one depth.

    Attributes:
        heads: the nodes above that have children.
        most: children of a head, at most.
        nodes: the children of all heads.
        drawn: which of the `heads * most` drawn tokens the nodes are.
        run: which of the nodes have children; `parents` are theirs among all nodes that are run.
        drawn_index, run_index: the same on the device; None if it is all of them in order.
    """

    heads: list[int]
    most: int
    nodes: list[int]
    drawn: list[int]
    run: list[int]
    parents: tuple[int, ...]
    drawn_index: Tensor | None
    run_index: Tensor | None


@lru_cache(maxsize=128)
def draft_steps(parents: tuple[int, ...], device: torch.device) -> tuple[DraftStep, ...]:
    """Return the steps of a tree, from the root's children down."""
    tree, steps = tree_of(parents), []
    rows = {ROOT: ROOT}  # the number of each node among those that are run
    heads = [ROOT]
    while heads:
        families = [tree.children[head + 1] for head in heads]
        most = max(map(len, families))
        nodes = [node for family in families for node in family]
        drawn = [index * most + rank for index, family in enumerate(families) for rank in range(len(family))]
        heads_below = [node for node in nodes if tree.children[node + 1]]
        run = [nodes.index(node) for node in heads_below]
        above = tuple(rows[tree.parents[node]] for node in heads_below)
        rows.update({node: len(rows) - 1 + index for index, node in enumerate(heads_below)})
        indices = _index(drawn, len(heads) * most, device), _index(run, len(nodes), device)
        steps.append(DraftStep(heads, most, nodes, drawn, run, above, *indices))
        heads = heads_below
    return tuple(steps)


def _index(chosen: list[int], size: int, device: torch.device) -> Tensor | None:
    return None if len(chosen) == size else upload(torch.tensor(chosen, dtype=torch.long), device)
