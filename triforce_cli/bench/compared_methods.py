"""The methods that a benchmark compares. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.errors import SettingsError
from offload.hardware.schema import did_you_mean
from offload.settings.config import DRAFTS, Speculation
from offload.settings.methods import METHODS, MIDDLES
from offload.settings.tree_settings import TreeShape

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
NAMES = (*METHODS, *TREES)
_MIDDLE, _TREE = "middle=", "tree="


class Combination(NamedTuple):
    """A method's name, and the values of some options for it alone; "" for those of the command line."""

    name: str
    draft: str = ""
    middle: str = ""
    tree: str = ""


def parse(names: str) -> tuple[str, ...]:
    """Return the methods in a list with commas, each once. Raises SettingsError for unknown ones.

    A method is a name, or a name with values for it alone: of --draft, such as `retrieval:self` or `triforce:none`; of
    --middle, such as `retrieval:middle=h2o`; of --tree, such as `lookup:tree=16`; or of several, in this order, such as
    `triforce:none:middle=h2o:tree=k-ary:2x2`.
    """
    parsed = [name.strip() for name in names.split(",")]
    for each in parsed:
        name, draft, middle, tree = _combination(each)
        if name not in NAMES:
            hint = f"{did_you_mean(name, NAMES)}methods: {', '.join(NAMES)}"
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
    """Return the name of a method in the table METHODS, of what `parse` returns."""
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
