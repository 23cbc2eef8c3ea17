"""The experts of a mixture, and how many of them a pass reads. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

# Of a layer's experts: where a pass reads as many, copying the others too costs less than not knowing them in advance.
NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a decoder's sparse layers, whose MLP is a mixture of them.

    Attributes:
        count: experts of a layer.
        per_token: how many of them a token is routed to.
        width: the intermediate size of each.
        layers: how many of the decoder's layers are sparse.
        shared: the intermediate size of the expert that all tokens have beside those; 0 without one.
    """

    count: int
    per_token: int
    width: int
    layers: int
    shared: int = 0

    def distinct(self, tokens: float) -> float:
        """Return the expected number of experts of a layer that `tokens` tokens read together."""
        return expected_experts(self.count, self.per_token, tokens)

    def reads_all(self, tokens: float) -> bool:
        """Return whether `tokens` tokens read so many that a layer's experts are copied ahead, all of them."""
        return reads_all(self.count, self.per_token, tokens)


def expected_experts(count: int, per_token: int, tokens: float) -> float:
    """Return the expected number of experts, of `count`, that `tokens` tokens read together, each `per_token` of them.

    It is count * (1 - (1 - per_token / count) ** tokens), if each token's experts are random and independent of the
    others' (MoESD, arXiv 2505.19645). Where neighbouring tokens share more of them, they read fewer.
    """
    return count * (1 - (1 - per_token / count) ** tokens)


def reads_all(count: int, per_token: int, tokens: float) -> bool:
    """Return whether `tokens` tokens read nearly all of `count` experts, each `per_token` of them."""
    return expected_experts(count, per_token, tokens) >= NEARLY_ALL * count
