"""Grow a tree while it is drafted: where the drafter is unsure, a node gets a second child.

The shapes of `trees/shape.py` are fixed before a draft, so they branch everywhere alike. A drafter that is nearly
always right, such as the target on a retrieval cache, is wrong where its distribution is flat: branches belong there
alone (EAGLE-2, arXiv 2406.16858, section 4.1). Unlike there, no token is dropped once it is drawn, and how many
children a node gets follows from its distribution, before they are drawn: so the output keeps its distribution.
"""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.host_memory import upload
from ...sequence import TokenSequence
from ...settings.tree_settings import GROWN_CHILDREN, TreeSampling
from ..sampling.warp import read_tokens
from ..trees.tree import ROOT, Draft, DraftedTree, tree_of, visits
from .tree_drafter import TreeDrafting

_ROWS = 8  # nodes of a depth that are run, at most
_LEAST_GAIN = 0.05  # expected tokens, for which another pass is worth its time
# A node is drafted if it is reached with this probability, divided by the nodes that there may be: .03 to .08 yield
# as many tokens with 63 of them.
_REACHED = 3.2
_WORTH = 1.5  # tokens that come in the time of a plain step
_SURENESS = (0.3, 0.5, 0.7, 0.9, 0.97)  # bounds of the classes of nodes, by the probability of the likeliest child
_WEIGHT = 4.0  # of a prior, in verified children
_SHAPE = DraftedTree((), TreeSampling.WITHOUT_REPLACEMENT)


class Priors(NamedTuple):
    """The acceptance of a first child in each class of nodes, and of later ones where those before them are wrong.

    `usual` is that of any next token: what running a node is expected to bring.
    """

    first: tuple[float, ...]
    later: tuple[float, float]
    usual: float


# SmolLM2-135M on a retrieval cache of 1,024 of 6,000 tokens of two books, and a head of it on text that it has written.
SELECTED = Priors((0.6, 0.85, 0.93, 0.98, 0.99, 0.995), (0.75, 0.5), 1.0)
TRAINED = Priors((0.27, 0.47, 0.55, 0.65, 0.82, 0.9), (0.25, 0.17), 0.45)


class Beliefs:
    """How likely a child of a class of nodes is accepted, where those before it were not: priors, and what was seen."""

    def __init__(self, prior: float, later: tuple[float, float]) -> None:
        self._priors = (prior, *later)
        self._tried, self._accepted = [0] * GROWN_CHILDREN, [0] * GROWN_CHILDREN

    def observe(self, children: int, accepted: int | None) -> None:
        """Count a node with so many children, of which the one of this rank was accepted, or none."""
        for rank in range(children if accepted is None else accepted + 1):
            self._tried[rank] += 1
            self._accepted[rank] += rank == accepted

    def rates(self) -> list[float]:
        """Return the probability of each child, in the order in which they are tried; not increasing."""
        found, left = [], 1.0
        for prior, tried, accepted in zip(self._priors, self._tried, self._accepted, strict=True):
            belief = (accepted + prior * _WEIGHT) / (tried + _WEIGHT)
            found.append(min(left * belief, *found[-1:], 1.0))
            left *= 1 - belief
        return found


class Growth:
    """Which nodes a tree of up to `nodes` nodes gets: what is believed of children, by how sure the drafter is."""

    def __init__(self, nodes: int, priors: Priors = SELECTED, row_cost: float = 0.0, pass_cost: float = 0.0) -> None:
        """`row_cost` is that of a further row of the verification, `pass_cost` of drafting a depth, in plain steps.

        A node has to bring more tokens than its row takes the time of, and a depth more than its pass.
        """
        self.most, self.is_weighed = nodes, row_cost > 0
        self._beliefs = [Beliefs(prior, priors.later) for prior in priors.first]
        self._usual, self._row_cost = priors.usual, row_cost
        self.weigh(row_cost, pass_cost, nodes)
        self._last: tuple[int, list[int], tuple[int, ...], dict[int, int]] | None = None

    def weigh(self, row_cost: float, pass_cost: float, nodes: int) -> None:
        """Grow by these costs from now on, up to `nodes` nodes. A row does not cost less than half of what it should.

        Measured over few rows, it may seem to cost nothing.
        """
        self.nodes, row_cost = min(nodes, self.most), max(row_cost, self._row_cost / 2)
        self._least = max(min(_REACHED / self.most, 0.25), _WORTH * row_cost)
        self._least_run = max(_LEAST_GAIN, _WORTH * (row_cost + pass_cost)) / self._usual

    def children(self, sure: float, reached: float) -> list[float]:
        """Return the probability of each child that a node shall have: one at least.

        `sure` is the probability of the likeliest child, `reached` that of the node itself.
        """
        rates = self._beliefs[bisect(_SURENESS, sure)].rates()
        found = [reached * rate for rate in rates if reached * rate >= self._least]
        return found or [reached * rates[0]]

    def heads(self, nodes: Sequence[int], reached: dict[int, float], room: int) -> list[int]:
        """Return which of the nodes of a depth are run, so that they get children: none if that is not worth it."""
        likely = sorted((node for node in nodes if reached[node] >= self._least), key=lambda node: -reached[node])
        chosen = sorted(likely[: min(_ROWS, room)])
        return chosen if sum(reached[node] for node in chosen) >= self._least_run else []

    def note(self, start: int, tokens: list[int], parents: tuple[int, ...], sure: dict[int, float]) -> None:
        """Note the draft behind `start` tokens, with the sureness of its nodes."""
        self._last = start, tokens, parents, {node: bisect(_SURENESS, value) for node, value in sure.items()}

    def learn(self, sequence: TokenSequence) -> None:
        """Learn from how the sequence has gone on behind the last draft."""
        last, self._last = self._last, None
        if last is None or len(sequence) <= last[0]:
            return
        start, tokens, parents, classes = last
        tree = tree_of(parents)
        path = tree.follow(tokens, sequence.tokens[start:])
        for node, visit in zip((ROOT, *path), visits(tree, path), strict=False):
            self._beliefs[classes[node]].observe(*visit)


class _Nodes:
    """The nodes of a tree that grows: parents, tokens, and how likely each is reached; and the distributions so far."""

    def __init__(self, before: list[int]) -> None:
        self.parents: list[int] = []
        self.ids: list[int] = []
        self.reached = {ROOT: 1.0}
        self.sure: dict[int, float] = {}  # of nodes that were run
        self.heads = [ROOT]  # nodes whose rows are the last ones
        self.run: list[int] = []  # nodes that were run, in order
        self.rows: list[Tensor] = []
        self.paths = {ROOT: before}

    def extend(self, drawn: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], room: int) -> list[int]:
        """Give each head its children, of those drawn; return the new nodes. First children come before second ones."""
        ranked = [(rank > 0, -chance, head) for head, each in enumerate(chances) for rank, chance in enumerate(each)]
        counts = Counter(head for *_, head in sorted(ranked)[:room])
        first = len(self.ids)
        for index, head in enumerate(self.heads):
            for token, chance in zip(drawn[index][: counts[index]], chances[index], strict=False):
                self.reached[len(self.ids)] = chance
                self.parents.append(head)
                self.ids.append(token)
        return list(range(first, len(self.ids)))

    def descend(self, heads: list[int]) -> list[int]:
        """Let `heads` get children next; return their parents, by number among the nodes that are run."""
        number = {ROOT: ROOT} | {node: index for index, node in enumerate(self.run)}
        self.paths = {node: [*self.paths[self.parents[node]], self.ids[node]] for node in heads}
        self.run += heads
        self.heads = heads
        return [number[self.parents[node]] for node in heads]

    def distributions(self) -> Tensor:
        """Return the rows of the root and of the nodes, `[nodes, vocab]`; those of nodes without children are zeros."""
        every = torch.cat(self.rows)
        at = upload(torch.tensor([0, *(node + 1 for node in self.run)]), every.device)
        return every.new_zeros((int(max(self.run, default=ROOT)) + 2, every.shape[1])).index_copy_(0, at, every)


class GrowingDrafting(TreeDrafting):
    """Drafts of one model as trees that grow. The host waits for each pass, on which the next one depends."""

    def grow(self, sequence: TokenSequence, limit: int, growth: Growth) -> Draft:
        """Return a tree, at most `limit` deep, that may follow the sequence."""
        growth.learn(sequence)
        nodes = _Nodes(sequence.tentative)
        logits = self._passes.first(sequence, limit)
        for position in range(len(sequence), len(sequence) + limit):
            nodes.rows.append(self._rows(logits, _SHAPE, [nodes.paths[head] for head in nodes.heads]))
            drawn, sure = self._drawn(nodes.rows[-1], position)
            nodes.sure |= dict(zip(nodes.heads, sure, strict=True))
            chances = [growth.children(s, nodes.reached[head]) for s, head in zip(sure, nodes.heads, strict=True)]
            new = nodes.extend(drawn, chances, growth.nodes - len(nodes.ids))
            heads = growth.heads(new, nodes.reached, growth.nodes - len(nodes.ids))
            if not heads or position == len(sequence) + limit - 1:
                break
            above = nodes.descend(heads)
            ids = upload(torch.tensor([nodes.ids[node] for node in heads]), self._model.device)
            logits = self._passes.following_nodes(ids, above)
        self._passes.resolve_nodes([nodes.ids[node] for node in nodes.run])
        parents = tuple(nodes.parents)
        growth.note(len(sequence), nodes.ids, parents, nodes.sure)
        is_one_hot = self._ranks(_SHAPE) or self._sampler.noise is not None
        return Draft(nodes.ids, None if is_one_hot else self._passes.spread(nodes.distributions()), parents)

    def _drawn(self, rows: Tensor, position: int) -> tuple[list[list[int]], list[float]]:
        """Return children of each row and the probability of its likeliest child, by one copy from the device.

        Where they are drawn at random, that is the row's largest probability, which does not depend on them. Ranks use
        rank 0's.
        """
        noise = self._sampler.noise
        drawn = self._draw(rows, GROWN_CHILDREN, _SHAPE, position)
        if self._ranks(_SHAPE):
            sure = rows.gather(1, drawn).softmax(1)[:, 0]
        elif noise is None:
            sure = rows.amax(1)
        else:
            scores = rows.gather(1, drawn) / noise.of_tokens(
                torch.full_like(drawn, position).flatten(), drawn.flatten()
            ).view(drawn.shape)
            sure = scores[:, 0] / scores.sum(1)
        values = torch.cat((self._passes.ids(drawn.flatten()).double(), sure.double())).tolist()
        if any(map(math.isnan, values)):
            read_tokens(drawn.flatten(), rows)  # raises
        for group in (self._model.group, self._group):
            values = values if group.size == 1 else group.agree(values)
        count = len(rows) * GROWN_CHILDREN
        ids = list(map(int, values[:count]))
        return [ids[at : at + GROWN_CHILDREN] for at in range(0, count, GROWN_CHILDREN)], values[count:]
