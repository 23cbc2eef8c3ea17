"""The settings of token trees: which shape, and how their tokens are drawn and verified. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ..short_repr import short_repr
from .validation import require

MOST_NODES = 1024
MOST_AUTO_NODES = 768  # Sequoia's largest trees
MOST_CHILDREN = 32  # of a node of a tree that is not k-ary
DEEPEST = 32
_HINT = "use a number of nodes, such as 64; auto; chain; or a k-ary tree, such as k-ary:2x3x1"


class TreeSampling(str, Enum):
    """How the children of a node are drawn from the drafter's distribution and verified. All are lossless."""

    WITHOUT_REPLACEMENT = "without-replacement"  # Sequoia, arXiv 2402.12374, Algorithm 2
    WITH_REPLACEMENT = "with-replacement"  # SpecInfer's multi-step speculative sampling, arXiv 2305.09781
    TOP_K = "top-k"  # the likeliest tokens, each as if it had been certain


TREE_SAMPLINGS = tuple(sampling.value for sampling in TreeSampling)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Which trees are drafted.

    Attributes:
        kind: chain; auto: the size and depth with the highest expected throughput; best: the best tree of `nodes` nodes
            (Sequoia's); k-ary: every node at depth d has `widths[d]` children.
        nodes: of the tree; None if the kind does not fix it.
        widths: of a k-ary tree, from the root down.
    """

    kind: str
    nodes: int | None = None
    widths: tuple[int, ...] = ()

    @property
    def most_children(self) -> int:
        """Return how many children a node may have."""
        if self.kind == "chain":
            return 1
        return max(self.widths, default=min(self.nodes or MOST_CHILDREN, MOST_CHILDREN))

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Return the shape that `text` names: `N`, `auto`, `chain` or `k-ary:2x3x...`.

        Raises SettingsError.
        """
        if text in ("auto", "chain"):
            return cls(text)
        if text.isascii() and text.isdigit():
            nodes = int(text) if len(text) < 10 else MOST_NODES + 1
            require(1 <= nodes <= MOST_NODES, f"tree is {short_repr(text)}", f"use 1 to {MOST_NODES:,} nodes")
            return cls("best", nodes)
        is_k_ary = re.fullmatch(r"k-ary:[0-9]{1,6}(x[0-9]{1,6})*", text) is not None
        require(is_k_ary, f"tree is {short_repr(text)}", _HINT)
        widths = tuple(map(int, text.removeprefix("k-ary:").split("x")))
        require(min(widths) >= 1, f"tree is {short_repr(text)}", "use widths of 1 or more, such as k-ary:2x3x1")
        require(len(widths) <= DEEPEST, f"tree is {len(widths)} levels deep", f"use at most {DEEPEST} levels")
        nodes = _k_ary_nodes(widths)
        require(
            nodes <= MOST_NODES,
            f"tree {short_repr(text)} has {'over ' * (nodes > 10**9)}{min(nodes, 10**9):,} nodes",
            f"use at most {MOST_NODES:,}, by smaller or fewer widths",
        )
        return cls("k-ary", nodes, widths)


def _k_ary_nodes(widths: tuple[int, ...]) -> int:
    level, nodes = 1, 0
    for width in widths:
        level *= width
        nodes += level
    return nodes
