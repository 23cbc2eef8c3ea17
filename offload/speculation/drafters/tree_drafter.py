"""Draft a tree with a model: logits for each depth, whose rows are the nodes that have children."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.host_memory import download, upload
from ...model.decoder import Model
from ...parallel import Group
from ...sequence import TokenSequence
from ...settings.tree_settings import TreeSampling
from ..sampling.warp import Sampler, read_tokens
from ..trees.tree import ROOT, Draft, DraftedTree, tree_of
from ..trees.tree_verification import draw_children
from ..trees.verification import draw_children_coupled
from .draft_passes import DraftPasses


class Generation(NamedTuple):
    """The nodes at one depth.

    Attributes:
        heads: the nodes above that have children.
        most: children of a head.
        nodes: the children of all heads.
        drawn: which of the `heads * most` drawn tokens the nodes are, on the device.
        run: which of the nodes have children, on the device; `parents` are theirs among all nodes that are run.
    """

    heads: list[int]
    most: int
    nodes: list[int]
    drawn: Tensor
    run: Tensor
    parents: tuple[int, ...]


@lru_cache(maxsize=64)
def generations(parents: tuple[int, ...], device: torch.device) -> tuple[Generation, ...]:
    """Return the depths of a tree, from the root's children down."""
    tree, found = tree_of(parents), []
    rows = {ROOT: ROOT}  # the number of each node among those that are run
    heads = [ROOT]
    while heads:
        families = [tree.children[head + 1] for head in heads]
        most = max(map(len, families))
        nodes = [node for family in families for node in family]
        drawn = [index * most + rank for index, family in enumerate(families) for rank in range(len(family))]
        heads_below = [node for node in nodes if tree.children[node + 1]]
        above = tuple(rows[tree.parents[node]] for node in heads_below)
        rows.update({node: len(rows) - 1 + index for index, node in enumerate(heads_below)})
        run = [nodes.index(node) for node in heads_below]
        indices = (upload(torch.tensor(each, dtype=torch.long), device) for each in (drawn, run))
        found.append(Generation(heads, most, nodes, *indices, above))
        heads = heads_below
    return tuple(found)


class TreeDrafting:
    """The drafts of one model. The tokens stay on the device until the end, as in `ModelDrafter`."""

    def __init__(self, model: Model, passes: DraftPasses, sampler: Sampler, group: Group) -> None:
        """All ranks use the tokens of the `group`'s rank 0."""
        self._model, self._passes, self._sampler, self._group = model, passes, sampler, group

    def propose(self, sequence: TokenSequence, shape: DraftedTree) -> Draft:
        """Return a tree of the given shape that may follow the sequence."""
        plan = generations(shape.parents, self._model.device)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        paths = [sequence.tentative]
        logits = self._passes.first(sequence, len(plan))
        for position, depth in enumerate(plan, len(sequence)):
            rows.append(self._rows(logits, shape, paths))
            drawn = self._draw(rows[-1], depth.most, shape, position)
            ids = self._passes.ids(drawn.flatten().index_select(0, depth.drawn))
            tokens.append(self._agreed(ids))
            if depth.parents:
                ids = tokens[-1].index_select(0, depth.run)
                logits = self._passes.following_nodes(ids, depth.parents)
                paths = self._paths(paths, depth, tokens[-1])
        return self._draft(shape, plan, tokens, rows)

    def _ranks(self, shape: DraftedTree) -> bool:
        """Return whether children are the likeliest tokens, as at temperature 0: its distributions name only one."""
        sampler = self._sampler
        return sampler.sampling.greedy or (shape.sampling is TreeSampling.TOP_K and sampler.noise is None)

    def _draw(self, rows: Tensor, count: int, shape: DraftedTree, position: int) -> Tensor:
        """Return children of nodes `[nodes, count]`, for a position of the sequence."""
        sampler = self._sampler
        if self._ranks(shape):
            return draw_children(rows, count, sampler.generator, TreeSampling.TOP_K)
        if sampler.noise is not None:
            return draw_children_coupled(rows, sampler.noise, position, count)
        return draw_children(rows, count, sampler.generator, shape.sampling)

    def _rows(self, logits: Tensor, shape: DraftedTree, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return what children are drawn from: distributions, or the logits that rank them."""
        sampler = self._sampler
        own = paths if sampler.reads_history else None
        if self._ranks(shape):
            return sampler.penalised(logits, own)
        return sampler.distribution(logits, paths=own)

    def _agreed(self, tokens: Tensor) -> Tensor:
        """Return the tokens of rank 0, if the ranks share this model: all shares must run the same."""
        if self._model.group.size == 1:
            return tokens
        agreed = self._model.group.agree(download(tokens))
        return upload(torch.tensor([int(token) for token in agreed]), tokens.device)

    def _paths(self, paths: list[list[int]], depth: Generation, tokens: Tensor) -> list[list[int]]:
        """Return the tentative tokens before each node that is run, if a distribution depends on them."""
        if not self._sampler.reads_history:
            return paths
        above = dict(zip(depth.heads, paths, strict=True))
        ids, parents = download(tokens), [depth.heads[index // depth.most] for index in depth.drawn.tolist()]
        return [[*above[parents[index]], ids[index]] for index in depth.run.tolist()]

    def _draft(
        self, shape: DraftedTree, plan: Sequence[Generation], tokens: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> Draft:
        """Read the tokens, by one copy, and return them in the tree's order."""
        highest = torch.cat([each.amax(dim=-1, keepdim=True) for each in rows])
        ids = read_tokens(torch.cat(tokens), highest)
        nodes = [node for depth in plan for node in depth.nodes]
        in_order = [token for _, token in sorted(zip(nodes, ids, strict=True))]
        run = [node for depth in plan for node in depth.nodes if tree_of(shape.parents).children[node + 1]]
        self._passes.resolve([in_order[node] for node in run])
        in_order = [int(token) for token in self._group.agree(in_order)]
        if self._ranks(shape) or self._sampler.noise is not None:
            return Draft(in_order, None, shape.parents)
        heads = [head + 1 for depth in plan for head in depth.heads]
        every = self._passes.spread(torch.cat(list(rows)))
        if heads != list(range(len(heads))):
            index = upload(torch.tensor(heads), every.device)
            every = every.new_zeros((max(heads) + 1, every.shape[1])).index_copy_(0, index, every)
        return Draft(in_order, every, shape.parents)
