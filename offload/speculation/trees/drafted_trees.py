"""Which trees a drafter drafts: a fixed shape, the best one of a size for the acceptance so far, or the fastest one."""

from collections.abc import Hashable

from ...settings.tree_settings import DEEPEST, MOST_AUTO_NODES, TreeSampling, TreeShape
from .acceptance import Acceptance
from .best_size import Seconds, SizedTree, fastest_tree, sized_tree
from .shape import best_tree
from .tree import k_ary, tree_of, within

_RENEW = 8  # cycles after which the fastest tree is computed again: it takes up to a few milliseconds
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, DEEPEST)  # that are considered


class DraftTrees:
    """Chooses the shape of each draft of one drafter.

    A k-ary shape is fixed. A number of nodes is the best tree of that size (shape.py) for the measured acceptance. If a
    chain is a choice too, the tree is the one with the fewest expected seconds a token (best_size.py): an automatic
    shape may have any size and depth then, and a shape of a size any depth.

    Attributes:
        deepest: depth of the trees, at most.
        may_be_chain: whether the scheduler compares them with chains.
    """

    def __init__(self, shape: TreeShape, sampling: TreeSampling, may_be_chain: bool = False) -> None:
        """`shape` is none of chains. An automatic shape always may be a chain."""
        self.sampling = sampling
        self.may_be_chain = may_be_chain or shape.kind == "auto"
        self.deepest = len(shape.widths) or DEEPEST
        self._shape = shape
        self._fastest: dict[Hashable, tuple[int, SizedTree]] = {}  # by kind, with the cycle in which it was computed

    def best(
        self,
        kind: Hashable,
        acceptance: Acceptance,
        cycle: int,
        depth: int,
        draft_s: Seconds,
        verify_s: Seconds,
        most_rows: int,
    ) -> SizedTree:
        """Return the shape of a draft of a kind at a cycle, with its expected tokens and seconds.

        It is at most `depth` deep. Seconds of a draft step and of a verification follow from their rows; beyond
        `most_rows`, nothing is known of them.
        """
        if self.may_be_chain:
            tree = self._renewed(kind, acceptance, cycle, draft_s, verify_s, most_rows)
        elif self._shape.widths:
            tree = SizedTree(k_ary(self._shape.widths), 1.0, 0.0)
        else:
            nodes = self._shape.nodes or MOST_AUTO_NODES
            parents = best_tree(acceptance.rates(cycle), nodes, min(depth, DEEPEST))
            tree = SizedTree(parents or (-1,), 1.0, 0.0)
        if tree_of(tree.parents).depth <= depth:
            return tree
        return tree._replace(parents=within(tree.parents, depth), tokens=min(tree.tokens, depth + 1.0))

    def _renewed(
        self,
        kind: Hashable,
        acceptance: Acceptance,
        cycle: int,
        draft_s: Seconds,
        verify_s: Seconds,
        most_rows: int,
    ) -> SizedTree:
        """Return the fastest tree, computed again after a few cycles."""
        since, tree = self._fastest.get(kind, (0, None))
        if tree is None or cycle - since >= min(_RENEW, since // 2):
            rates = acceptance.rates(cycle) or (0.0,)
            if self._shape.kind == "auto":
                nodes = min(MOST_AUTO_NODES, most_rows - 1)
                tree = fastest_tree(rates, draft_s, verify_s, nodes, DEEPEST, may_pause=False, depths=_DEPTHS)
            else:
                tree = sized_tree(self._shape, rates, draft_s, verify_s)
            self._fastest[kind] = cycle, tree
        return tree
