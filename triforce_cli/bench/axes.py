"""The settings of which `bench` takes lists, and how lists are written. Imports nothing heavy."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from offload.errors import SettingsError
from offload.settings.config import Speculation
from offload.settings.method_sizes import drafter_kind
from offload.settings.methods import LOOKUP, METHODS
from offload.short_repr import short_repr
from offload.units import parse_tokens

MOST_POINTS = 10_000  # of a grid; more is a slip
CONTEXT = "context"
BATCH = "batch"  # sequences that are decoded together
_IN_GROUPS_OF_3 = re.compile(r"[1-9]\d{0,2}(,\d{3})+")  # as messages write a number of tokens


class Grouped(int):
    """A number that was written in groups of three digits, which may have been meant as a list."""

    @property
    def hint(self) -> str:
        """Return how to write the list."""
        several = "two" if self < 10**6 else "several"
        return f'for {several} contexts: --context "{self:,}"'.replace(",", ", ")


@dataclass(frozen=True, slots=True)
class Values:
    """Several values of one option, each once. `str` writes them with the separator, as the option reads them."""

    values: tuple[Any, ...]
    separator: str = field(default=",", compare=False)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        return self.separator.join(str(each).removesuffix(".0") for each in self.values)


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting that may vary, by its name among the settings, with its option.

    `level` says which methods read it: "all", those that draft ("drafting"), those with a middle level ("middle"), or
    those that draw trees from a model's distributions ("trees").
    """

    name: str
    option: str
    parse: Callable[[str], Any]
    level: str = "all"

    @property
    def title(self) -> str:
        return self.option.removeprefix("--")

    def is_read_by(self, speculation: Speculation) -> bool:
        """Return whether the axis has any influence on a method."""
        method = METHODS[speculation.method]
        draws_trees = speculation.tree_shape.kind != "chain" and drafter_kind(speculation) != LOOKUP
        return {
            "all": True,
            "drafting": method.speculates,
            "middle": method.middle is not None,
            "trees": method.speculates and draws_trees,
        }[self.level]


def parse_context(text: str, name: str = CONTEXT) -> int | Values:
    """Return tokens, or several with commas, of an option. `8,192` is one number, as before there were lists.

    Raises SettingsError.
    """
    if _IN_GROUPS_OF_3.fullmatch(text.strip()):
        return Grouped(parse_tokens(text))
    found = parse_list(text, parse_tokens, name)
    is_one_number = isinstance(found, Values) and _IN_GROUPS_OF_3.fullmatch(str(found))
    return replace(found, separator=", ") if is_one_number else found


def parse_list(text: str, parse: Callable[[str], Any], name: str) -> Any:
    """Return a value, or Values if there are several with commas. Raises SettingsError."""
    found = []
    _refuse_groups(text, parse, name)
    for part in str(text).split(","):
        try:
            found.append(parse(part.strip()))
        except (ValueError, SettingsError):
            what = {int: "a whole number", float: "a number", str: "a value"}.get(parse, "a number of tokens")
            hint = f"give {what}, or several with commas"
            raise SettingsError(f"--{name} is {short_repr(text)}: {short_repr(part)} is not {what}", hint) from None
    distinct = tuple(dict.fromkeys(found))
    return distinct[0] if len(distinct) == 1 else Values(distinct)


def _refuse_groups(text: str, parse: Callable[[str], Any], name: str) -> None:
    """Raise SettingsError for a list of whole numbers that is rather one number with commas: 1,024."""
    if parse is int and re.fullmatch(r"\s*\d{1,3}(,\d{3})*,0\d\d(,\d{3})*\s*", str(text)):
        one = str(text).strip().replace(",", "")
        hint = f"for one number write {one}; for several, none begins with 0: 64, 128"
        raise SettingsError(f"--{name} is {short_repr(text)}, which is no list of numbers", hint)


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


AXES = {
    axis.name: axis
    for axis in (
        Axis(CONTEXT, "--context", parse_tokens),
        Axis(BATCH, "--batch", int),
        Axis("max_new_tokens", "--new", int),
        Axis("temperature", "--temperature", float),
        Axis("top_p", "--top-p", float),
        Axis("tree", "--tree", _text, "drafting"),
        Axis("tree_sampling", "--tree-sampling", _text, "trees"),
        Axis("gamma1", "--gamma1", int, "middle"),
        Axis("gamma2", "--gamma2", int, "drafting"),
        Axis("sink", "--sink", int, "drafting"),
        Axis("window", "--window", int, "drafting"),
        Axis("rebuild_every", "--rebuild-every", int, "middle"),
        Axis("chunk", "--chunk", int, "middle"),
        Axis("budget", "--budget", int, "middle"),
    )
}


def varied(flags: Mapping[str, Any]) -> dict[str, Values]:
    """Return the settings that have several values, in the order of AXES."""
    return {name: flags[name] for name in AXES if isinstance(flags.get(name), Values)}


def points(axes: Mapping[str, Sequence[Any] | Values]) -> list[dict[str, Any]]:
    """Return the product of the axes' values, each point by setting. Raises SettingsError for too many."""
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST_POINTS:
        raise SettingsError(f"the lists have {count:,} combinations", f"give fewer values: at most {MOST_POINTS:,}")
    return [dict(zip(axes, each, strict=True)) for each in product(*axes.values())]
