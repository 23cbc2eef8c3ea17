"""The policy of `auto` over recorded acceptance rates and step times: a grid of texts, contexts, links and lengths.

Times are those of the embedded model on two cores. A fixed method chooses its draft lengths, but never pauses.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest

from offload.sequence import TokenSequence
from offload.speculation.auto.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.drafters.ngram import LookupDrafter
from offload.speculation.passes.estimators import ROW_COST
from offload.speculation.trees.tree import Draft

SEEDS = {64: 8, 256: 3}  # by tokens; runs of a cell
RESELECT = 64  # tokens between two selections


@dataclass(frozen=True)
class Machine:
    """Seconds of a step by rows (interpolated), of a pass over the retrieval cache, and of its selections.

    Without `retrieval_s`, the context is too short for a retrieval cache.
    """

    steps: dict[int, float]
    retrieval_s: float = 0.0
    first_selection_s: float = 0.0
    selection_s: float = 0.0
    # What the program estimates before it measures, in plain steps: of a selection, of a pass, of a further row.
    selection_cost: float = 6.6
    relative_cost: float = 0.59
    row_cost: float = ROW_COST

    def step(self, rows: int) -> float:
        """Return the seconds of a verification."""
        known = sorted(self.steps)
        high = next((n for n in known if n >= rows), known[-1])
        low = max((n for n in known if n < high), default=high)
        slope = (self.steps[high] - self.steps[low]) / max(high - low, 1)
        return self.steps[high] + slope * (rows - high)


MACHINES = {
    "2K": Machine({1: 0.0105, 4: 0.0135, 8: 0.0175}),
    "8K": Machine({1: 0.0164, 4: 0.0217, 8: 0.0290}, 0.009, 0.1, 0.008),
    "32K": Machine({1: 0.035, 4: 0.0525, 8: 0.1}, 0.009, 0.4, 0.02, selection_cost=11.0, relative_cost=0.25),
    "32K, quantised": Machine(
        {1: 0.026, 4: 0.034, 8: 0.052}, 0.0035, 0.4, 0.02, selection_cost=13.0, relative_cost=0.12
    ),
    "8K, link": Machine(
        {1: 0.667, 8: 0.69},
        0.011,
        0.15,
        0.03,
        selection_cost=1.8,
        relative_cost=0.065,
        row_cost=0.025,
    ),
}


@dataclass(frozen=True)
class Text:
    """Acceptance rates: of retrieval, of the latest tokens (StreamingLLM), of n-gram lookup and of a draft model.

    `matches` is how often lookup has a match.
    """

    retrieval: float
    streaming: float
    lookup: float
    matches: float
    model: float = 0.0


TEXTS = {
    "hardest": Text(0.5, 0.4, 0.3, 0.3),
    "hard": Text(0.75, 0.7, 0.1, 0.3),
    "new": Text(0.85, 0.85, 0.3, 0.3),
    "easy": Text(0.95, 0.95, 0.3, 0.3),
    "summary": Text(0.9, 0.8, 0.6, 0.5),
    "quoting": Text(0.95, 0.6, 0.95, 0.95),
}
CHANGES = {"hard -> quoting": ("hard", "quoting"), "quoting -> hard": ("quoting", "hard")}


class World:
    """The text under way: answers whether a draft token is right, and keeps the time."""

    def __init__(self, machine: Machine, texts: tuple[Text, ...], tokens: int, seed: int) -> None:
        self.machine, self.tokens = machine, tokens
        self._texts, self._random = texts, random.Random(seed)
        self.emitted, self.seconds, self.selected_at = 0, 0.0, -1
        self.has_match = False

    @property
    def text(self) -> Text:
        return self._texts[min(self.emitted * len(self._texts) // self.tokens, len(self._texts) - 1)]

    def happens(self, chance: float) -> bool:
        return self._random.random() < chance

    def accepted(self, drafter, gamma: int) -> int:
        """Return how many of `gamma` drafted tokens are accepted."""
        return next((n for n in range(gamma) if not self.happens(drafter.acceptance)), gamma)


class Lookup:
    name, relative_cost, setups, longest = "lookup", 0.0, 0, 24

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def acceptance(self) -> float:
        return self.world.text.lookup

    def draft_kind(self, sequence):
        if not self.world.has_match:
            return None
        return 5 if self.acceptance > 0.8 else 3 if self.acceptance > 0.5 else 2  # the more repeats, the longer matches

    def prior(self, kind) -> float:
        return LookupDrafter().prior(kind)

    def setup_cost(self, sequence) -> float:
        return 0.0

    def propose(self, sequence, limit: int, tree=None) -> Draft:
        return Draft([7] * limit, None)

    def seconds(self, gamma: int) -> float:
        return 0.0


class Model(Lookup):
    """A draft model of a fifth of the target's time at 2K."""

    name, relative_cost = "draft", 0.2

    @property
    def acceptance(self) -> float:
        return self.world.text.model

    def draft_kind(self, sequence):
        return True

    def prior(self, kind) -> float:
        return 0.6

    def seconds(self, gamma: int) -> float:
        return gamma * 0.002


class Retrieval(Lookup):
    name = "retrieval"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.relative_cost, self.setups = world.machine.relative_cost, 0

    @property
    def acceptance(self) -> float:
        return self.world.text.retrieval

    def draft_kind(self, sequence):
        return self.name

    def prior(self, kind) -> float:
        return 0.9

    def _is_due(self) -> bool:
        return self.setups == 0 or self.world.emitted - self.world.selected_at > RESELECT

    def setup_cost(self, sequence) -> float:
        return 0.0 if not self._is_due() else 0.5 if self.setups else self.world.machine.selection_cost

    def seconds(self, gamma: int) -> float:
        machine, selection = self.world.machine, 0.0
        if self._is_due():
            selection = machine.selection_s if self.setups else machine.first_selection_s
            self.setups, self.world.selected_at = self.setups + 1, self.world.emitted
        return gamma * machine.retrieval_s + selection


def seconds(world: World, scheduler: AdaptiveScheduler, lookup: Lookup) -> float:
    """Decode all tokens; return the seconds after the first one."""
    sequence = TokenSequence([0])
    while world.emitted < world.tokens:
        world.has_match = world.happens(world.text.matches)
        drafter, gamma = scheduler.choose(sequence, world.tokens - world.emitted - 1)
        drafter = drafter if gamma else None
        setups = 0 if drafter is None else drafter.setups
        accepted = 0 if drafter is None else world.accepted(drafter, gamma)
        draft_s = 0.0 if drafter is None else drafter.seconds(gamma)
        verify_s = world.machine.step(gamma + 1) if world.emitted else 0.0
        is_first = drafter is not None and drafter.setups > setups
        if drafter is None or drafter.relative_cost:  # what lookup would have proposed for the next token
            first = 7 if world.happens(lookup.acceptance) else 8
        else:
            first = 7 if accepted else 8
        scheduler.observe(Cycle(drafter, first, gamma, accepted, draft_s, verify_s, is_first))
        world.emitted += accepted + 1
        world.seconds += draft_s + verify_s
    return world.seconds


def measured(method: str, machine: Machine, texts: tuple[Text, ...], tokens: int) -> float:
    """Return the mean seconds of a method over the seeds."""
    total = 0.0
    for seed in range(SEEDS[tokens]):
        world = World(machine, texts, tokens, seed)
        lookup = Lookup(world)
        drafters = [lookup] if method in ("auto", "lookup") else []
        if machine.retrieval_s and method in ("auto", "retrieval"):
            drafters.append(Retrieval(world))
        if texts[0].model and method in ("auto", "model"):
            drafters.append(Model(world))
        scheduler = AdaptiveScheduler(drafters, None, method == "auto", tokens, row_cost=machine.row_cost)
        total += seconds(world, scheduler, lookup)
    return total / SEEDS[tokens]


def cells():
    """Return (name, machine, texts, tokens) of every cell."""
    texts = {name: (text,) for name, text in TEXTS.items()}
    texts |= {name: tuple(TEXTS[part] for part in parts) for name, parts in CHANGES.items()}
    texts |= {f"draft model {rate}": (replace(TEXTS["hard"], model=rate),) for rate in (0.3, 0.8)}
    for (place, machine), (name, each), tokens in itertools.product(MACHINES.items(), texts.items(), SEEDS):
        if not each[0].model or place == "2K":
            yield f"{place}, {name}, {tokens}", machine, each, tokens


@pytest.fixture(scope="module", params=[7, pytest.param(1, marks=pytest.mark.long)], ids=["few", "all"])
def ratios(request) -> dict[str, tuple[float, float]]:
    """The rate of `auto` of each cell, or of every seventh: of plain decoding's, and of the best method's."""
    found = {}
    for name, machine, texts, tokens in itertools.islice(cells(), 0, None, request.param):
        auto = measured("auto", machine, texts, tokens)
        plain = machine.step(1) * (tokens - 1)
        fixed = ["lookup", *(["retrieval"] if machine.retrieval_s else [])]
        fixed += ["model"] if texts[0].model else []
        best = min(plain, *(measured(method, machine, texts, tokens) for method in fixed))
        found[name] = plain / auto, best / auto
    return found


@pytest.mark.long
def test_auto_is_never_much_slower_than_plain_decoding(ratios):
    slow = {name: ratio for name, (ratio, _) in ratios.items() if ratio < (0.90 if name.endswith(" 64") else 0.95)}
    assert slow == {}


def test_auto_is_near_the_best_fixed_method_in_every_cell(ratios):
    """An answer of 64 tokens may take a dozen cycles, of which one or two go into learning."""
    low = {name: ratio for name, (_, ratio) in ratios.items() if ratio < (0.80 if name.endswith(" 64") else 0.90)}
    assert low == {}


def test_auto_is_nearly_the_best_fixed_method_on_average(ratios):
    assert math.exp(sum(math.log(ratio) for _, ratio in ratios.values()) / len(ratios)) >= 0.95
