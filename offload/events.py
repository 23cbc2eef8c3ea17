"""The events that the engine yields, in order: prefill, tokens, finished.

Events carry tokens, not text; `loading/tokenizers/text_stream.py` adds `Text` and `Thought` events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pinned:
    """`done` of `total` bytes of host memory are pinned, for a GPU's copies. Comes before the prefill."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Report that `done` of `total` prompt tokens are in the KV cache.

    `restored`: those since the previous event were read from a prompt cache instead of being run.
    """

    done: int
    total: int
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """`tokens` of the prompt were read from the prompt cache on disk instead of being run: `bytes`, in `seconds`."""

    tokens: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DraftPrefilled:
    """`done` of `total` prompt tokens that a draft model reads are in its cache, after the prefill of the target."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities at one position: `logprob` of the token there, `top` of the likeliest ones.

    They are the model's own, before temperature, penalties and top-p. `top` has ids with theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Emit new tokens, in order: one from plain decoding, one or more from a verification.

    `logprobs` are those of each token; empty unless they were asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Transferred:
    """Bytes transferred over the link so far, in both directions, and the seconds that it was busy."""

    bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class ExpertsRun:
    """What the experts of `layers` layers in host memory have done so far.

    Attributes:
        passes: layers of passes that ran some of them.
        experts: that ran, each counted once a layer of a pass.
        bytes: of weights that were read on the host, or copied to the device.
        seconds: in which the host ran them.
    """

    layers: int
    passes: int
    experts: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the answer with its log-probabilities; its text begins `offset` characters into the answer's."""

    id: int
    offset: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Text:
    """Emit final text: whole characters, no part of a stop string.

    `tokens` are those whose text ends in it, or with it; empty unless log-probabilities were asked for. A token that a
    stop string cuts is one of them, one that lies in a stop string is not.
    """

    text: str
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Thought:
    """Emit final text of what a reasoning model thinks before its answer, and the number of tokens that it took."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TreeStatistics:
    """Sums over the trees of one drafter and one verifier so far.

    `children` counts, for the k-th child of a node, how often it was tried and how often it was accepted.
    """

    verifications: int = 0
    nodes: int = 0
    depth: int = 0
    accepted: int = 0
    children: tuple[tuple[int, int], ...] = ()

    @property
    def child_acceptance(self) -> list[float]:
        """The probability that a verification that has reached a node goes on to its k-th child."""
        rates, left = [], 1.0
        for tried, accepted in self.children:
            rates.append(left * accepted / tried)
            left *= 1 - accepted / tried
        return rates

    def means(self) -> dict[str, int | float | list[float]]:
        """Return the number of trees, their mean nodes, depth and accepted depth, and `child_acceptance`."""
        return {
            "verifications": self.verifications,
            "nodes": self.nodes / self.verifications,
            "depth": self.depth / self.verifications,
            "accepted_depth": self.accepted / self.verifications,
            "child_acceptance": self.child_acceptance,
        }

    def plus(self, nodes: int, depth: int, visits: Sequence[tuple[int, int | None]]) -> TreeStatistics:
        """Return the statistics with one more tree; `visits` are the children, and the accepted one, of each node."""
        most = max([len(self.children), *(children if rank is None else rank + 1 for children, rank in visits)])
        counts = [list(pair) for pair in self.children] + [[0, 0] for _ in range(most - len(self.children))]
        for children, rank in visits:
            for pair in counts[: children if rank is None else rank + 1]:
                pair[0] += 1
            if rank is not None:
                counts[rank][1] += 1
        accepted = self.accepted + sum(rank is not None for _, rank in visits)
        total = self.verifications + 1, self.nodes + nodes, self.depth + depth, accepted
        return TreeStatistics(*total, tuple((tried, taken) for tried, taken in counts))


@dataclass(frozen=True, slots=True)
class LevelStatistics:
    """Statistics of one drafter and one verifier so far. `drafter` is "none" for plain steps; times in seconds.

    Drafted tokens after a rejected one are not verified. Of a tree, `drafted` counts the depth. `trees` is None for a
    drafter that has drafted no tree.
    """

    drafter: str
    verifier: str
    verifications: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    trees: TreeStatistics | None = None

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate of a token, accepted / verified; None if no token was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def accepted_of_drafted(self) -> float | None:
        """The accepted share of all drafted tokens; None if none was drafted.

        Tokens behind a rejected one count here, so it is below `acceptance`, the more so the longer the drafts.
        """
        return self.accepted / self.drafted if self.drafted else None

    def plus(
        self,
        drafted: int,
        accepted: int,
        draft_s: float,
        verify_s: float,
        nodes: int | None = None,
        visits: Sequence[tuple[int, int | None]] = (),
    ) -> LevelStatistics:
        """Return the statistics with one more verification; `nodes` and `visits` are those of a tree."""
        trees = self.trees
        if nodes is not None:
            trees = (trees or TreeStatistics()).plus(nodes, drafted, visits)
        tokens = self.drafted + drafted, self.verified + min(accepted + 1, drafted), self.accepted + accepted
        seconds = self.draft_s + draft_s, self.verify_s + verify_s
        return LevelStatistics(self.drafter, self.verifier, self.verifications + 1, *tokens, *seconds, trees)


@dataclass(frozen=True, slots=True)
class Gain:
    """The decoding time so far beside plain decoding's, in seconds, without the first token, which prefill computes.

    `plain_s` is what plain decoding would have taken for the same tokens: an estimate from the plain steps among the
    verifications. `step_s` is the present estimate of one.
    """

    decoding_s: float
    plain_s: float
    step_s: float

    @property
    def speedup(self) -> float:
        """How many times as fast as plain decoding."""
        return self.plain_s / self.decoding_s


@dataclass(frozen=True, slots=True)
class MaskStatistics:
    """Statistics of a constraint so far.

    Masks computed, the seconds that these and their application to logits took, tokens that the constraint dictated,
    and rows of logits that were masked.
    """

    masks: int
    seconds: float
    forced: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Speculated:
    """Report statistics after a verification. `levels` has the target's first; `using` names the last drafter.

    `gain` is None without drafters, and where too few plain steps were run to compare with. `masks` is None without a
    constraint.
    """

    method: str
    using: str
    levels: tuple[LevelStatistics, ...]
    gain: Gain | None = None
    masks: MaskStatistics | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """End the events. `reason` is "eos", "stop" (a stop string) or "length"."""

    reason: str


Event = (
    Pinned
    | Prefilled
    | Restored
    | DraftPrefilled
    | Tokens
    | Speculated
    | Transferred
    | ExpertsRun
    | Text
    | Thought
    | Finished
)
