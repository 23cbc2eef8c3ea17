"""Which trees a drafter drafts: a fixed shape, the best one of a size for the acceptance so far, or the fastest one."""

from collections.abc import Hashable, Sequence

from ...settings.tree_settings import DEEPEST, MOST_AUTO_NODES, MOST_CHILDREN, TreeSampling, TreeShape
from .best_size import Seconds, SizedTree, fastest_tree, sized_tree
from .shape import best_tree
from .tree import Visit, k_ary, tree_of, within

_LEAST = 1e-3  # children that are accepted less often are not worth a node in any tree
_MEMORY = 64.0  # visits: a longer memory would follow a change of text too slowly
_DIGITS = 2  # of an acceptance: beliefs that move less do not change the tree


class ChildAcceptance:
    """Moving averages of the probability that the k-th child of a node is accepted; old observations decay.

    The estimate for each k is the probability that the child is accepted if all before it were rejected: nodes with few
    children show it as well as nodes with many. The prior of a k-th child is 1/k of the first one's. Observations of
    one child move the beliefs about the later ones, which are seldom tried.
    """

    def __init__(self, prior: float, weight: float = 2.0, keep: float = 0.98) -> None:
        """`prior` is the acceptance of the first child, and counts as `weight` observations; `keep` is per cycle."""
        self._prior, self._weight, self._keep = prior, weight, keep
        self._accepted = [0.0] * MOST_CHILDREN
        self._tried = [0.0] * MOST_CHILDREN
        self._decayed_to = 0

    def observe(self, cycle: int, visits: Sequence[Visit]) -> None:
        """Count a verification in a cycle: the nodes that it reached, and which of their children it accepted."""
        self._decay(cycle)
        for visit in visits:
            last = visit.children - 1 if visit.accepted is None else visit.accepted
            for rank in range(min(last + 1, MOST_CHILDREN)):
                self._tried[rank] += 1
            if visit.accepted is not None and visit.accepted < MOST_CHILDREN:
                self._accepted[visit.accepted] += 1
        if self._tried[0] > _MEMORY:
            self._scale(_MEMORY / self._tried[0])

    def rates(self, cycle: int) -> tuple[float, ...]:
        """Return the acceptance of each child, given that its parent was reached; not increasing, and rounded.

        Children that are hardly ever accepted are left out. Equal beliefs give equal tuples, for caches of trees.
        """
        self._decay(cycle)
        rates: list[float] = []
        reached, belief, most = 1.0, self._prior, 1.0
        for rank in range(MOST_CHILDREN):
            if rank:
                belief *= rank / (rank + 1)
            belief = (self._accepted[rank] + belief * self._weight) / (self._tried[rank] + self._weight)
            most = min(most, reached * belief)
            if most < _LEAST:
                break
            rates.append(float(f"{most:.{_DIGITS}g}"))
            reached *= 1 - belief
        return tuple(rates)

    def _decay(self, cycle: int) -> None:
        self._scale(self._keep ** (cycle - self._decayed_to))
        self._decayed_to = cycle

    def _scale(self, factor: float) -> None:
        self._accepted = [value * factor for value in self._accepted]
        self._tried = [value * factor for value in self._tried]


_PRIOR = 0.6  # acceptance of a first child
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
        self._acceptance: dict[Hashable, ChildAcceptance] = {}
        self._fastest: dict[Hashable, tuple[int, SizedTree]] = {}  # by kind, with the cycle in which it was computed

    def best(
        self, kind: Hashable, cycle: int, depth: int, draft_s: Seconds, verify_s: Seconds, most_rows: int
    ) -> SizedTree:
        """Return the shape of a draft of a kind at a cycle, with its expected tokens and seconds.

        It is at most `depth` deep. Seconds of a draft step and of a verification follow from their rows; beyond
        `most_rows`, nothing is known of them.
        """
        if self.may_be_chain:
            tree = self._renewed(kind, cycle, draft_s, verify_s, most_rows)
        elif self._shape.widths:
            tree = SizedTree(k_ary(self._shape.widths), 1.0, 0.0)
        else:
            nodes = self._shape.nodes or MOST_AUTO_NODES
            parents = best_tree(self._of(kind).rates(cycle), nodes, min(depth, DEEPEST))
            tree = SizedTree(parents or (-1,), 1.0, 0.0)
        if tree_of(tree.parents).depth <= depth:
            return tree
        return tree._replace(parents=within(tree.parents, depth), tokens=min(tree.tokens, depth + 1.0))

    def observe(self, kind: Hashable, cycle: int, visits: Sequence[Visit]) -> None:
        """Note a verification of a draft of a kind."""
        self._of(kind).observe(cycle, visits)

    def _of(self, kind: Hashable) -> ChildAcceptance:
        return self._acceptance.setdefault(kind, ChildAcceptance(_PRIOR))

    def _renewed(self, kind: Hashable, cycle: int, draft_s: Seconds, verify_s: Seconds, most_rows: int) -> SizedTree:
        """Return the fastest tree, computed again after a few cycles."""
        since, tree = self._fastest.get(kind, (0, None))
        if tree is None or cycle - since >= min(_RENEW, since // 2):
            rates = self._of(kind).rates(cycle) or (0.0,)
            if self._shape.kind == "auto":
                nodes = min(MOST_AUTO_NODES, most_rows - 1)
                tree = fastest_tree(rates, draft_s, verify_s, nodes, DEEPEST, may_pause=False, depths=_DEPTHS)
            else:
                tree = sized_tree(self._shape, rates, draft_s, verify_s)
            self._fastest[kind] = cycle, tree
        return tree
