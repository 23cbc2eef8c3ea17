"""What an experiment measures: methods over lists of settings. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from offload.errors import SettingsError
from offload.hardware.schema import InvalidValue, dotted, refuse_unknown
from offload.settings.config import GROUPS, check_part
from offload.settings.methods import SELECTIONS

from ..bench.axes import AXES, BATCH, CONTEXT, Values, points
from ..bench.compared import BASE, EXACT, parse_methods, parse_modes
from ..bench.report import BY_PAIR
from ..input.plain_values import build, require
from ..options.settings import option_names

SPEED, QUALITY, ATTENTION, HITTERS, DRAFTERS = "speed", "quality", "attention", "heavy-hitters", "drafters"
IDEAL = "ideal"  # of attention: the tokens with the most weight, for each token anew
IDEAL_ONCE = "ideal-once"  # those with the most weight of the prompt's last token
# Of heavy hitters, which tokens are masked: none, those with the most attention, these but the sink, others at random.
MASKED = (EXACT, "heavy", "heavy-but-sink", "random")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of measurement: `parse` returns the names of its rows, that which others are compared with first."""

    parse: Callable[[Sequence[str]], tuple[str, ...]]
    measures: tuple[str, ...]


def _methods(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((BASE, *parse_methods(",".join(names)))))


def _modes(names: Sequence[str]) -> tuple[str, ...]:
    return parse_modes(",".join(names))


def _selections(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in (known := (IDEAL, IDEAL_ONCE, *SELECTIONS)):
            raise SettingsError(f"there is no selection {name!r}", f"selections: {', '.join(known)}")
    return tuple(dict.fromkeys((IDEAL, *names)))


def _masked(names: Sequence[str]) -> tuple[str, ...]:
    if unknown := set(names) - set(MASKED):
        raise SettingsError(f"no tokens are masked as {min(unknown)!r}", f"use some of: {', '.join(MASKED)}")
    return tuple(dict.fromkeys((EXACT, *names)))


def _drafters(names: Sequence[str]) -> tuple[str, ...]:
    if not all(names):
        raise SettingsError("one of the drafters has no name", "write them like lookup,self or lookup,Qwen/Qwen3-0.6B")
    return tuple(dict.fromkeys((BASE, *names)))


KINDS = {
    SPEED: Kind(_methods, ("speedup", "tbt_ms", *BY_PAIR, "tokens_per_s", "tokens_per_verification")),
    QUALITY: Kind(_modes, ("perplexity", "kl", "top1_agreement", "needles_found", "needle_log_prob")),
    ATTENTION: Kind(_selections, ("recovered",)),
    HITTERS: Kind(_masked, ("masked_perplexity",)),
    DRAFTERS: Kind(_drafters, ("speedup", "tbt_ms", "tokens_per_verification")),
}
MEASURES = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.measures))
_OF_PROMPTS = (CONTEXT, BATCH)  # settings of a grid that are no options of a run


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: the `settings` by the names of their options, each a value or, for what may vary, a list.

    Args:
        methods: of `bench`; modes of `bench --quality`, or selections, where those are the kind.
        kind: what is measured, one of KINDS.
        prompts: excerpts of each text.
        only: the combinations of values that run, where not all that the lists have do.
        each: settings for all of it, once for each: those that need another engine, such as where the KV cache is.
        last: tokens at the end of a text that are scored, of other kinds than speed.
        needles: texts with a needle, for quality.
    """

    methods: tuple[str, ...]
    settings: dict
    model: str | None = None
    draft: str | None = None
    prompts: int = 1
    repeats: int = 3
    only: tuple[dict, ...] = ()
    kind: str = SPEED
    each: tuple[dict, ...] = ()
    last: int = 64
    needles: int = 0

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "kind", self.kind, f"use one of: {', '.join(KINDS)}")
        KINDS[self.kind].parse(self.methods)
        require(self.last > 0, "last", self.last, "use a positive number of tokens")
        require(self.needles >= 0, "needles", self.needles, "use a number of texts")
        if self.kind != SPEED:
            require(CONTEXT in self.settings, f"settings.{CONTEXT}", None, "give the tokens of a text")
            require(self.batches == (1,), f"settings.{BATCH}", self.batches, "leave it out, or measure speed")
            require(not self.each, "each", self.each, "leave it out, or measure speed")
        require(self.prompts > 0, "prompts", self.prompts, "use a positive number")
        require(self.repeats > 0, "repeats", self.repeats, "use a positive number")
        known = [CONTEXT, BATCH, *sorted(option_names())]
        refuse_unknown(self.settings, known, ("settings",))
        for name, value in self.settings.items():
            require(
                not isinstance(value, list) or (name in AXES and len(value) > 0),
                f"settings.{name}",
                value,
                f"lists are for {', '.join(AXES)}",
            )
            _check_setting(name, value)
        for point in points(self._lists()):
            check_part({name: value for name, value in point.items() if name not in _OF_PROMPTS})
        for each in self.each:
            refuse_unknown(each, sorted(option_names()), ("each",))
            check_part({name: value for name, value in self.flags.items() if name in option_names()} | each)
            for name, value in each.items():
                _check_setting(name, value)
        for each in self.only:
            wrong = {name: value for name, value in each.items() if value not in self._lists().get(name, ())}
            require(not wrong, "only", each, "give combinations of the values in settings")

    def _lists(self) -> dict[str, list[Any]]:
        return {name: value if isinstance(value, list) else [value] for name, value in self.settings.items()}

    @property
    def varied(self) -> set[str]:
        """Return the names of the settings that vary."""
        return set(self.values)

    @property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each setting that varies."""
        lists = {name: tuple(dict.fromkeys(each)) for name, each in (self._lists() | self.engines).items()}
        return {name: each for name, each in lists.items() if len(each) > 1}

    @property
    def engines(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of the settings of `each`; None where one of them lacks it."""
        names = dict.fromkeys(name for one in self.each for name in one)
        return {name: tuple(dict.fromkeys(one.get(name) for one in self.each)) for name in names}

    @property
    def axes(self) -> dict[str, Values]:
        """Return the settings that vary, but for the context and the batch."""
        lists = {name: tuple(self.settings[name]) for name in AXES if isinstance(self.settings.get(name), list)}
        return {name: Values(each) for name, each in lists.items() if name not in _OF_PROMPTS and len(each) > 1}

    @property
    def contexts(self) -> tuple[int, ...] | None:
        """Return the contexts in tokens; None for all of a text."""
        return tuple(self._lists()[CONTEXT]) if CONTEXT in self.settings else None

    @property
    def batches(self) -> tuple[int, ...]:
        """Return the numbers of sequences that are decoded together."""
        return tuple(dict.fromkeys(self._lists().get(BATCH, [1])))

    @property
    def flags(self) -> dict[str, Any]:
        """Return the settings, the first value of each list."""
        single = {name: values[0] for name, values in self._lists().items() if name not in _OF_PROMPTS}
        return {name: each for name, each in {"model": self.model, "draft": self.draft}.items() if each} | single


def _check_setting(name: str, value: Any) -> None:
    """Raise InvalidValue for a setting, or a value of its list, of another type than its option's."""
    key, kind = ("settings", name), _kinds()[name]
    for each in value if isinstance(value, list) else [value]:
        if each is None and isinstance(value, list):
            raise InvalidValue(key, f"{dotted(key)} has an empty value in its list", "leave it out")
        build(kind, each, key)
        require(name not in _OF_PROMPTS or each > 0, dotted(key), each, "use a positive number, such as 4096")


def _kinds() -> dict[str, Any]:
    """Return the type hint of each setting."""
    return dict.fromkeys(_OF_PROMPTS, int) | {
        name: kind for group in GROUPS for name, kind in get_type_hints(group).items()
    }
