"""Which trees a drafter drafts: a fixed shape, the best one of a size for the acceptance so far, or the fastest one."""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from ...settings.tree_settings import DEEPEST, MOST_AUTO_NODES, MOST_CHILDREN, TreeSampling, TreeShape
from .best_size import RowTimes, SizedTree, fastest_tree, sized_tree
from .shape import best_tree
from .tree import DraftedTree, Visit, k_ary, tree_of, within

_LEAST = 1e-3  # children that are accepted less often are not worth a node in any tree
_MEMORY = 64.0  # visits: a longer memory would follow a change of text too slowly
_DIGITS = 2  # of an acceptance: beliefs that move less do not change the tree


class ChildAcceptance:
    """Moving averages of the probability that the k-th child of a node is accepted; old observations decay.

    What is estimated for each k is the probability that the child is accepted if all before it were rejected: nodes
    with few children tell it as well as nodes with many. The prior of a k-th child is 1/k of the first one's. What is
    observed of one child moves the beliefs about the later ones, which are seldom tried.
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

    @property
    def verified(self) -> float:
        """The number of verified first children behind the estimate, decayed."""
        return self._tried[0]

    def _decay(self, cycle: int) -> None:
        self._scale(self._keep ** (cycle - self._decayed_to))
        self._decayed_to = cycle

    def _scale(self, factor: float) -> None:
        self._accepted = [value * factor for value in self._accepted]
        self._tried = [value * factor for value in self._tried]


_PRIOR = 0.6  # acceptance of a first child
_RENEW = 8  # cycles after which the fastest tree is computed again: it takes up to a few milliseconds
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, DEEPEST)  # that are considered


class DraftTrees(Protocol):
    """Chooses the shape of each draft of one drafter."""

    deepest: int
    sampling: TreeSampling
    may_be_chain: bool  # whether a chain is a choice too

    def best(
        self, kind: Hashable, cycle: int, depth: int, draft_s: RowTimes, verify_s: RowTimes, most_rows: int
    ) -> SizedTree:
        """Return the shape of a draft of a kind at a cycle, with what is expected of it.

        It is at most `depth` deep. Seconds of a draft step and of a verification follow from their rows; beyond
        `most_rows`, nothing is known of them.
        """

    def observe(self, kind: Hashable, cycle: int, visits: Sequence[Visit]) -> None:
        """Note a verification of a draft of a kind."""


class FixedTrees:
    """Trees of one shape, cut off at the depth that is allowed."""

    may_be_chain = False

    def __init__(self, tree: DraftedTree) -> None:
        self._parents, self.sampling = tree.parents, tree.sampling
        self.deepest = tree_of(tree.parents).depth

    def best(
        self, kind: Hashable, cycle: int, depth: int, draft_s: RowTimes, verify_s: RowTimes, most_rows: int
    ) -> SizedTree:
        return SizedTree(self._parents if depth >= self.deepest else within(self._parents, depth), 1.0, 0.0)

    def observe(self, kind: Hashable, cycle: int, visits: Sequence[Visit]) -> None:
        pass


class BestTrees:
    """The best trees of a number of nodes (shape.py) for the measured acceptance of each child."""

    deepest, may_be_chain = DEEPEST, False

    def __init__(self, nodes: int, sampling: TreeSampling) -> None:
        self._nodes, self.sampling = nodes, sampling
        self._acceptance: dict[Hashable, ChildAcceptance] = {}

    def best(
        self, kind: Hashable, cycle: int, depth: int, draft_s: RowTimes, verify_s: RowTimes, most_rows: int
    ) -> SizedTree:
        return SizedTree(best_tree(self._rates(kind, cycle), self._nodes, min(depth, DEEPEST)) or (-1,), 1.0, 0.0)

    def observe(self, kind: Hashable, cycle: int, visits: Sequence[Visit]) -> None:
        self._of(kind).observe(cycle, visits)

    def _rates(self, kind: Hashable, cycle: int) -> tuple[float, ...]:
        return self._of(kind).rates(cycle)

    def _of(self, kind: Hashable) -> ChildAcceptance:
        return self._acceptance.setdefault(kind, ChildAcceptance(_PRIOR))


class FastestTrees(BestTrees):
    """The trees of a shape with the fewest expected seconds a token (best_size.py), or chains where those have fewer.

    An automatic shape may have any size and depth, and a shape of a size any depth.
    """

    may_be_chain = True

    def __init__(self, shape: TreeShape, sampling: TreeSampling) -> None:
        super().__init__(shape.nodes or MOST_AUTO_NODES, sampling)
        self._shape = shape
        self._found: dict[Hashable, tuple[int, SizedTree]] = {}  # by kind, with the cycle in which it was computed

    def best(
        self, kind: Hashable, cycle: int, depth: int, draft_s: RowTimes, verify_s: RowTimes, most_rows: int
    ) -> SizedTree:
        since, found = self._found.get(kind, (-_RENEW, None))
        if found is None or cycle - since >= min(_RENEW, since // 2):
            found = self._fastest(self._rates(kind, cycle) or (0.0,), draft_s, verify_s, most_rows)
            self._found[kind] = cycle, found
        return found if tree_of(found.parents).depth <= depth else _cut(found, depth)

    def _fastest(self, rates: tuple[float, ...], draft_s: RowTimes, verify_s: RowTimes, most_rows: int) -> SizedTree:
        if self._shape.kind != "auto":
            return sized_tree(self._shape, rates, draft_s, verify_s)
        nodes = min(self._nodes, most_rows - 1)
        return fastest_tree(rates, draft_s, verify_s, nodes, DEEPEST, may_pause=False, depths=_DEPTHS)


def _cut(tree: SizedTree, depth: int) -> SizedTree:
    """Return the part of a tree up to a depth, near the end of an answer; its tokens are limited too."""
    return tree._replace(parents=within(tree.parents, depth), tokens=min(tree.tokens, depth + 1.0))


def draft_trees(
    shape: TreeShape, sampling: TreeSampling, may_be_chain: bool = False
) -> Callable[[], DraftTrees] | None:
    """Return what makes the chooser of a drafter's trees of a shape.

    None for chains.
    With `may_be_chain`, as always for an automatic shape, chains are drafted where they are faster.
    """
    if shape.kind == "chain":
        return None
    if may_be_chain or shape.kind == "auto":
        return lambda: FastestTrees(shape, sampling)
    if shape.kind == "k-ary":
        return lambda: FixedTrees(DraftedTree(k_ary(shape.widths), sampling))
    return lambda: BestTrees(shape.nodes, sampling)
