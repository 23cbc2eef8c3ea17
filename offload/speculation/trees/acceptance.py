"""The estimate of how likely drafted tokens are accepted."""

from collections.abc import Sequence

from ...settings.tree_settings import MOST_CHILDREN
from .tree import Visit

_LEAST = 1e-3  # children that are accepted less often are not worth a node in any tree
_MEMORY = 32.0  # visits: a longer memory would follow a change of text too slowly
_DIGITS = 2  # of an acceptance: beliefs that move less do not change the tree


class Acceptance:
    """The probability that the k-th child of a node is accepted: Beta distributions, whose old observations decay.

    Tokens of a chain are first children. The estimate for each k is the probability that the child is accepted if all
    before it were rejected: nodes with few children show it as well as nodes with many. The prior of a k-th child is
    1/k of the first one's. Observations of one child move the beliefs about the later ones, which are seldom tried.
    """

    def __init__(self, prior: float, weight: float = 2.0, keep: float = 0.98) -> None:
        """`prior` is the acceptance of the first child, and counts as `weight` observations; `keep` is per cycle."""
        self._prior, self._weight, self._keep = prior, weight, keep
        self._accepted = [0.0] * MOST_CHILDREN
        self._tried = [0.0] * MOST_CHILDREN
        self._decayed_to = 0  # the cycle up to which both have decayed

    def count(self, cycle: int, visits: Sequence[Visit]) -> None:
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

    def rate(self, cycle: int) -> float:
        """Return the mean of a first child at a cycle. It decays to the prior, so that drafting is tried again."""
        self._decay(cycle)
        return self._belief(0, self._prior)

    def spread(self, cycle: int) -> float:
        """Return the standard deviation of `rate`."""
        rate = self.rate(cycle)
        return (rate * (1 - rate) / (self._tried[0] + self._weight + 1)) ** 0.5

    def rates(self, cycle: int) -> tuple[float, ...]:
        """Return the acceptance of each child, given that its parent was reached; not increasing, and rounded.

        Children that are hardly ever accepted are left out. Equal beliefs give equal tuples, for caches of trees.
        """
        self._decay(cycle)
        rates: list[float] = []
        reached, belief, most = 1.0, self._prior, 1.0
        for rank in range(MOST_CHILDREN):
            belief = self._belief(rank, belief * rank / (rank + 1) if rank else belief)
            most = min(most, reached * belief)
            if most < _LEAST:
                break
            rates.append(float(f"{most:.{_DIGITS}g}"))
            reached *= 1 - belief
        return tuple(rates)

    def _belief(self, rank: int, prior: float) -> float:
        return (self._accepted[rank] + prior * self._weight) / (self._tried[rank] + self._weight)

    def _decay(self, cycle: int) -> None:
        self._scale(self._keep ** (cycle - self._decayed_to))
        self._decayed_to = cycle

    def _scale(self, factor: float) -> None:
        self._accepted = [value * factor for value in self._accepted]
        self._tried = [value * factor for value in self._tried]
