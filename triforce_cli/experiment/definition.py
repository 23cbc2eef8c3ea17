"""The schema of an experiment's file: what it reproduces, the published values, what to plan, what to measure.

Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Any

from offload.hardware.schema import InvalidValue, Key, dotted
from offload.settings.config import Speculation
from offload.settings.placement_settings import OFFLOADS
from offload.short_repr import short_repr
from offload.speculation.passes.estimators import token_rate

from ..bench.axes import AXES
from ..bench.report import BY_PAIR
from ..input.plain_values import require
from ..options.settings import option_names
from .grid import KINDS, MEASURES, Grid

PUBLISHED_ALONE = ("accuracy",)  # measures that nothing here has: of values that say what is `missing`


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A plan to make: the hardware profile, the model, the tokens of a sequence and the paper's settings.

    `acceptance` is the rate a token at which the full cache accepts the retrieval level's, `draft_acceptance` that at
    which the retrieval level accepts the draft's. Where a paper gives it as a share of all drafted tokens, it is
    `accepted_of_drafted`, for drafts of `drafted` tokens. `static_batch` runs `sequences` in lock step.

    `authors_code` predicts the loop of the papers' own code beside the plan. `recompute` compares a step with reading
    all of its tokens anew.
    """

    gpu: str
    model: str
    tokens: int
    method: str = "triforce"
    draft: str | None = None
    budget: int = 4096
    gamma1: int | None = None
    gamma2: int | None = None
    offload: str = "auto"
    resident_layers: int | None = None
    acceptance: float | None = None
    accepted_of_drafted: float | None = None
    drafted: int = 6
    draft_acceptance: float | None = None
    sequences: int = 1
    static_batch: bool = False
    tree: str = "chain"
    memory_gib: float | None = None
    authors_code: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        self.speculation()  # checks the settings
        require(self.offload in OFFLOADS, "offload", self.offload, f"use one of: {', '.join(OFFLOADS)}")
        require(self.memory_gib is None or self.memory_gib > 0, "memory_gib", self.memory_gib, "use a positive number")
        require(self.tokens > 0, "tokens", self.tokens, "use a positive number")
        both = self.acceptance is not None and self.accepted_of_drafted is not None
        require(not both, "accepted_of_drafted", self.accepted_of_drafted, "give one of it and acceptance")
        require(self.drafted > 0, "drafted", self.drafted, "use a positive number")
        require(self.sequences > 0, "sequences", self.sequences, "use a positive number")

    @property
    def token_acceptance(self) -> float | None:
        """The acceptance as a rate a token."""
        share = self.accepted_of_drafted
        return self.acceptance if share is None else token_rate(share, self.drafted)

    def speculation(self) -> Speculation:
        """Return the settings of the method. Raises SettingsError."""
        lengths: dict[str, Any] = {
            "budget": self.budget,
            "gamma1": self.gamma1,
            "gamma2": self.gamma2,
            "tree": self.tree,
        }
        return Speculation(self.method, self.draft or "lookup", **lengths)


@dataclass(frozen=True, slots=True)
class Value:
    """One value: `published` with its source, and how to plan it or which measured row it is.

    Args:
        row: the method and the settings of the row that measures it.
        missing: why it can be neither planned nor measured here.
        within: the planned or measured value agrees if it differs by no more than this share of the published one.
    """

    what: str
    measure: str
    published: float | None = None
    source: str | None = None
    plan: PlanCase | None = None
    row: dict = field(default_factory=dict)
    within: float | None = None
    missing: str | None = None

    def __post_init__(self) -> None:
        if self.missing is None or self.measure not in PUBLISHED_ALONE:
            _check_measure(self.measure)
        require(None in (self.missing, self.plan), "missing", self.missing, "leave it out where there is a plan")
        require(self.published is None or self.source is not None, "source", None, "name where the value is published")
        require(self.within is None or self.within > 0, "within", self.within, "use a share, such as 0.15")


@dataclass(frozen=True, slots=True)
class Check:
    """A rule for what was measured: every row of a method is `at_least` so much, or it rises or falls along a setting.

    `row` names the rows that it is about, by the values of settings that vary: all without it.
    `tolerance` is by how much it may go the other way from one value to the next; `pair` is for measures by drafter and
    verifier; `runs` is quick, full or both.
    """

    what: str
    measure: str
    method: str
    pair: str | None = None
    at_least: float | None = None
    along: str | None = None
    direction: str = "rises"
    tolerance: float = 0.0
    runs: str = "both"
    row: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_measure(self.measure)
        require(self.runs in ("quick", "full", "both"), "runs", self.runs, "use quick, full or both")
        require(self.direction in ("rises", "falls"), "direction", self.direction, "use rises or falls")
        has_pair, names = self.pair is not None, " and ".join(BY_PAIR)
        require((self.measure in BY_PAIR) == has_pair, "pair", self.pair, f"it goes with {names}")
        require((self.at_least is None) != (self.along is None), "along", self.along, "give either at_least or along")
        require(self.along not in self.row, "row", self.row, "leave out what `along` names")
        known = self.along is None or self.along in (*AXES, *option_names())
        require(known, "along", self.along, f"use one of: {', '.join(AXES)}")


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment. `shows` says what a run on a small model can show, and what it cannot."""

    name: str
    title: str
    reproduces: str
    needs: str
    shows: str
    judged: str
    values: tuple[Value, ...] = ()
    bench: Grid | None = None
    quick: Grid | None = None
    judge: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        plans = any(value.plan is not None for value in self.values)
        require(bool(plans or self.bench), "values", None, "give plans among the values, or a bench")
        require(
            (self.bench is None) == (self.quick is None), "quick", None, "a bench needs a quick one, and it a bench"
        )
        for number, check in enumerate(self.judge, 1):
            for name, grid in {"full": self.bench, "quick": self.quick}.items():
                if check.runs in (name, "both"):
                    _check_rule(("judge", str(number)), check, grid, "bench" if name == "full" else name)

    def grid(self, quick: bool) -> Grid:
        """Return what is to be measured, of an experiment that measures."""
        grid = self.quick if quick else self.bench
        assert grid is not None, "an experiment has both grids, or none and only plans"
        return grid


def _check_rule(key: Key, check: Check, grid: Grid | None, where: str) -> None:
    """Raise InvalidValue for a rule on what a grid does not measure."""
    if grid is None:
        raise InvalidValue(key, f"{dotted(key)} is a rule for what is measured, and nothing is", "add bench and quick")
    kind = KINDS[grid.kind]
    if check.measure not in kind.measures:
        message = f"{dotted(key)}: {where} does not measure {check.measure}"
        raise InvalidValue((*key, "measure"), message, f"use one of: {', '.join(kind.measures)}")
    methods = kind.parse(grid.methods)
    if check.method not in methods:
        message = f"{dotted(key)}: {where} does not run the method {short_repr(check.method)}"
        raise InvalidValue((*key, "method"), message, f"use one of: {', '.join(methods)}; or `runs` for the other one")
    if check.along is not None and check.along not in grid.varied:
        message = f"{dotted(key)}: {check.along} does not vary in {where}"
        raise InvalidValue((*key, "along"), message, f"give it a list in {where}.settings; or `runs` for the other one")
    for name, value in check.row.items():
        if value not in grid.values.get(name, ()):
            message = f"{dotted(key)}: no row of {where} has {name} {short_repr(value)}"
            hint = f"use a value of a list in {where}.settings; or `runs` for the other one"
            raise InvalidValue((*key, "row"), message, hint)


def _check_measure(measure: str) -> None:
    require(measure in MEASURES, "measure", measure, f"use one of: {', '.join(MEASURES)}")
