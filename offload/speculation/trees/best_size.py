"""The size and depth of tree with the highest expected throughput on this hardware (Sequoia, arXiv 2402.12374, 3.3)."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ...settings.tree_settings import DEEPEST, TreeShape
from .shape import Candidates, Rates, candidates, expected_tokens
from .tree import k_ary, tree_of

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768)

Seconds = Callable[[int], float]  # of a pass, by its number of rows


class SizedTree(NamedTuple):
    """A tree, the tokens that its verification is expected to yield, and the seconds of drafting and verifying it."""

    parents: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def token_s(self) -> float:
        """The expected seconds per token."""
        return self.seconds / self.tokens


def fastest_tree(
    acceptance: Rates,
    draft_s: Seconds,
    verify_s: Seconds,
    nodes: int,
    depth: int,
    sizes: Sequence[int] = SIZES,
    may_pause: bool = True,
    depths: Sequence[int] = range(1, DEEPEST + 1),
) -> SizedTree:
    """Return the tree with the fewest expected seconds per token; without nodes, if plain decoding is the fastest.

    A draft takes one step for each depth. Its rows are the nodes that get children there: 1 for the first step, whose
    row is the sequence's last token. A verification has a row for each node, and one for the last token.

    Args:
        draft_s, verify_s: seconds of a step by its rows, as measured.
        nodes, depth: the largest size and the largest depth to consider.
        sizes: numbers of nodes to consider, in ascending order.
        depths: the depths to consider, besides that of the deepest node that is worth a row.
        may_pause: whether plain decoding is a choice too.
    """
    pool = candidates(acceptance, nodes, depth)
    verify, draft = _of_arrays(verify_s), _of_arrays(draft_s)
    best, chosen = SizedTree((), 1.0, verify_s(1)), None
    ranking = pool.best(len(pool.reached), depth)
    deepest = max(pool.depths, default=0)
    for limit in sorted({min(level, deepest) for level in (*depths, deepest)} - {0}):
        ranked = ranking[pool.depths[ranking] <= limit][:nodes]
        counts = np.array([size for size in sizes if size < len(ranked)] + [len(ranked)])
        tokens = 1 + pool.reached[ranked].cumsum()[counts - 1]
        seconds = draft(_draft_rows(pool, ranked, limit)[:, counts - 1]).sum(axis=0) + verify(counts + 1)
        index = int((seconds / tokens).argmin())
        if seconds[index] / tokens[index] < best.token_s or (chosen is None and not may_pause):
            best = SizedTree((), float(tokens[index]), float(seconds[index]))
            chosen = ranked[: counts[index]]
    return best if chosen is None else best._replace(parents=pool.tree(chosen))


def sized_tree(shape: TreeShape, acceptance: Rates, draft_s: Seconds, verify_s: Seconds) -> SizedTree:
    """Return the tree of a shape with the fewest expected seconds per token, as `fastest_tree` does.

    The number of nodes of a chain and of an automatic tree, and the depth of a tree of fixed size, are chosen.
    """
    if shape.kind == "k-ary":
        parents = k_ary(shape.widths)
        tree = tree_of(parents)
        inner = [tree.depths[node] for node in range(len(tree)) if tree.children[node + 1]]
        rows = [1, *(inner.count(depth) for depth in range(tree.depth - 1))]
        return SizedTree(
            parents, expected_tokens(parents, acceptance), sum(map(draft_s, rows)) + verify_s(len(tree) + 1)
        )
    if shape.nodes is not None:
        return fastest_tree(acceptance, draft_s, verify_s, shape.nodes, DEEPEST, (), may_pause=False)
    if shape.kind == "chain":
        return fastest_tree(acceptance[:1], draft_s, verify_s, DEEPEST, DEEPEST)
    return fastest_tree(acceptance, draft_s, verify_s, SIZES[-1], DEEPEST)


def _of_arrays(seconds: Seconds) -> Callable[[np.ndarray], np.ndarray]:
    """Return the seconds by rows for arrays of rows. Each number of rows is asked for once; none takes no time."""
    known = cache(lambda rows: seconds(rows) if rows else 0.0)

    def of(rows: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(rows, return_inverse=True)
        return np.array([known(count) for count in distinct.tolist()])[inverse].reshape(rows.shape)

    return of


def _draft_rows(pool: Candidates, chosen: np.ndarray, depth: int) -> np.ndarray:
    """Return the rows of each draft step, by the number of nodes of the tree: `[depth, nodes]`, 0 where there is none.

    A node gets a row as soon as it gets its first child.
    """
    is_first, levels = pool.ranks[chosen] == 0, pool.depths[chosen]
    return np.stack([(is_first & (levels == level)).cumsum() for level in range(1, depth + 1)])
