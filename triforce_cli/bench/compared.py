"""The methods that a benchmark compares, and the lossy modes that it compares with exact decoding. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from offload.errors import SettingsError
from offload.hardware.schema import did_you_mean
from offload.settings.config import DRAFTS, QUANTIZE, Speculation
from offload.settings.kv_formats import LOSSY_KV
from offload.settings.methods import APPROXIMATIONS, METHODS, MIDDLES
from offload.settings.tree_settings import TreeShape

from ..options.settings import Settings, resolve_with

BASE = "ar"  # the baseline
DEFAULT = "all that can run"
IN_BATCHES = (BASE, "auto")  # that run in batches, unless others are named
# Published methods with token trees: a draft model and its tree.
TREES = {
    "sequoia": Speculation(method="naive", draft="a model", tree="auto"),  # arXiv 2402.12374
    "specinfer": Speculation(  # arXiv 2305.09781, with the widths of its evaluation
        method="naive", draft="a model", tree="k-ary:1x1x3x1x1x1x1x1", tree_sampling="with-replacement"
    ),
}
METHOD_NAMES = (*METHODS, *TREES)
_MIDDLE, _TREE = "middle=", "tree="


class Combination(NamedTuple):
    """A method's name, and the values of some options for it alone; "" for those of the command line."""

    name: str
    draft: str = ""
    middle: str = ""
    tree: str = ""


def parse_methods(names: str) -> tuple[str, ...]:
    """Return the methods in a list with commas, each once. Raises SettingsError for unknown ones.

    A method is a name, or a name with values for it alone: of --draft, such as `retrieval:self` or `triforce:none`; of
    --middle, such as `retrieval:middle=h2o`; of --tree, such as `lookup:tree=16`; or of several, in this order, such as
    `triforce:none:middle=h2o:tree=k-ary:2x2`.
    """
    parsed = [name.strip() for name in names.split(",")]
    for each in parsed:
        name, draft, middle, tree = _combination(each)
        if name not in METHOD_NAMES:
            hint = f"{did_you_mean(name, METHOD_NAMES)}methods: {', '.join(METHOD_NAMES)}"
            raise SettingsError(f"there is no method {name!r}", hint)
        if f":{_TREE}" in each:
            TreeShape.parse(tree)
        if f":{_MIDDLE}" in each and (middle not in MIDDLES or METHODS[name_of(each)].middle is None):
            hint = f"use one of: {', '.join(MIDDLES)}; with a method that has a middle level, such as retrieval"
            raise SettingsError(f"{each}: {middle!r} cannot be its middle level", hint)
        if draft not in ("", *DRAFTS) or each.endswith(":"):
            hint = f"use one of: {', '.join(DRAFTS)}; or {_MIDDLE} and a cache, or {_TREE} and a shape"
            raise SettingsError(f"{each}: {draft!r} cannot be its drafter here", hint)
    return tuple(dict.fromkeys(parsed))


def name_of(method: str) -> str:
    """Return the name of a method in the table METHODS, of what `parse_methods` returns."""
    name = _combination(method).name
    return TREES[name].method if name in TREES else name


def _combination(text: str) -> Combination:
    text, _, tree = text.partition(f":{_TREE}")
    text, _, middle = text.partition(f":{_MIDDLE}")
    name, _, draft = text.partition(":")
    return Combination(name, draft, middle, tree)


def speculations(methods: Sequence[str] | None, settings: Speculation) -> dict[str, Speculation]:
    """Return the settings of each method, plain decoding first; None stands for all that can run.

    Raises SettingsError for a method that cannot run.
    """
    if methods is None:
        methods = [name for name in METHODS if not METHODS[name].needs_draft_model or settings.draft_model is not None]
    return {each: _speculation(each, settings) for each in dict.fromkeys([BASE, *methods])}


def _speculation(method: str, settings: Speculation) -> Speculation:
    name, draft, middle, tree = _combination(method)
    trees = TREES.get(name, settings)
    return replace(
        settings,
        method=name_of(method),
        draft=draft or settings.draft,
        middle=middle or settings.middle,
        tree=tree or trees.tree,
        tree_sampling=trees.tree_sampling,
    )


EXACT = "exact"  # the model as it is: what the others are compared with
DENSE = "dense"  # all tokens, also of a text beyond the model's context, which is not extended: a baseline
RECOMPUTE = "recompute"  # the latest `budget` tokens run anew for each token: a baseline, and no way to decode
# The settings of each mode, over those of the command line. A new mode is a line here.
MODES: dict[str, Mapping[str, Any]] = {
    EXACT: {},
    **{name: {"approximate": name} for name in APPROXIMATIONS},
    **{f"kv={kind}": {"kv": kind} for kind in LOSSY_KV},
    **{f"quantize={level}": {"quantize": level} for level in reversed(QUANTIZE)},
}

MODE_NAMES = (*MODES, DENSE, RECOMPUTE)
CHANGED = frozenset(name for values in MODES.values() for name in values)  # settings that the modes decide


def parse_modes(names: str, known: Collection[str] = MODE_NAMES, others: str = "") -> tuple[str, ...]:
    """Return the modes in a list with commas, each once, the exact one first. Raises SettingsError for unknown ones.

    A mode is one that is `known`, or several of them joined by +, which change different things. `others` are named
    behind them in the hint.
    """
    parsed = [name.strip() for name in names.split(",")]
    for name in (part for each in parsed for part in each.split("+")):
        if name not in known:
            hint = f"{did_you_mean(name, known)}modes: {', '.join(known)}{others}"
            raise SettingsError(f"there is no mode {name!r}", hint)
    for name in parsed:
        _check_parts(name)
    return tuple(dict.fromkeys((EXACT, *parsed)))


def _check_parts(mode: str) -> None:
    """Raise SettingsError for a mode whose parts change the same thing, of which one would not apply."""
    parts = list(dict.fromkeys(mode.split("+")))
    caches = [part for part in parts if part in (DENSE, RECOMPUTE) or "approximate" in MODES[part]]
    others = [[part for part in parts if name in MODES.get(part, {})] for name in ("kv", "quantize")]
    for same in (caches, *others):
        if len(same) > 1:
            raise SettingsError(f"{mode}: {same[0]} and {same[1]} exclude each other", "give each as a mode of its own")


def recomputes(mode: str) -> bool:
    """Return whether a mode of what `parse_modes` returns runs a window anew for each token."""
    return RECOMPUTE in mode.split("+")


def is_dense(mode: str) -> bool:
    """Return whether a mode of what `parse_modes` returns attends to all tokens of a text of any length."""
    return DENSE in mode.split("+")


def values_of(mode: str) -> dict[str, Any]:
    """Return the settings that make a mode of what `parse_modes` returns."""
    return {name: value for part in mode.split("+") for name, value in MODES.get(part, {}).items()}


def settings_of(mode: str, given: Settings) -> Settings:
    """Return the given settings in a mode. Raises SettingsError if they contradict it."""
    clean = {name: value for name, value in given.values.items() if name not in CHANGED}
    return resolve_with(clean | values_of(mode), given.origins, given.profile, chosen_by_name=False)
