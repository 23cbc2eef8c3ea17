"""YAML files that describe hardware: read with the line of every key, so that each error names file, line and key."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import yaml

from ..bounded import Unbounded, read_bounded
from ..errors import SettingsError
from ..short_repr import short_repr, short_text
from ..units import parse_size
from .schema import UNITS, Key, Misfit, dotted, refuse_unknown

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # in other places before Python 3.11

_MOST_BYTES = 2**16  # of a file; a profile has about 1,000
_MOST_VALUES = 10_000  # in a file whose aliases are written out
_DEPTH = 2  # mappings in a profile: itself, and its parts
_SIZES = ("memory", "host_memory")  # options in bytes, for which nobody wants to write 23622320128
_SMALL = "a profile is a small YAML file"
_SHIPPED = "see the profiles that come with the program"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says, and where: `places` has "mine.yaml, line 3" for each key, for () the file's first line."""

    values: Any
    places: dict[Key, str]

    def error(self, key: Key, message: str, hint: str) -> SettingsError:
        """An error that begins with the place of a key, or of what it is missing in."""
        while key not in self.places:
            key = key[:-1]
        return SettingsError(f"{self.places[key]}: {message}", hint)

    def over(self, base: Document) -> Document:
        """This on top of another: mappings are merged key by key, everything else is replaced."""
        return Document(_merged(base.values, self.values), base.places | self.places)


def read(file: Path | Traversable, source: str) -> Document:
    """One file, which messages call `source`.

    Raises SettingsError for what is no YAML, for keys given twice, and for aliases that stand for too much.
    """
    text = _text(file, source)
    try:
        loader = yaml.SafeLoader(text)
        try:
            return _document(loader, source)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
        raise _not_yaml(f"{source}, line {line + 1}", short_text(problem)) from error
    except RecursionError as error:  # 5,000 brackets
        raise _not_yaml(source, "nested too deeply") from error


def read_extended(
    file: Path | Traversable, source: str, find: Callable[[str], Path | Traversable], above: tuple[str, ...] = ()
) -> Document:
    """A file on top of the one that its `extends` names, and so on.

    Args:
        find: the file of a profile that comes with the program, by its name; raises SettingsError. What ends with
            .yaml or has a slash is a path, seen from the folder of the file that names it.
        above: the files that extend this one, to find circles.

    Raises SettingsError.
    """
    document = read(file, source)
    if not isinstance(document.values, dict) or "extends" not in document.values:
        return document
    wanted = document.values.pop("extends")
    chain = (*above, os.path.realpath(str(file)))
    try:
        base, base_source = _base(wanted, source, find)
        _text(base, base_source)  # that it cannot be read is this file's mistake; what is wrong in it is its own
        if os.path.realpath(str(base)) in chain:
            raise SettingsError("the files extend each other in a circle", "let one of them stand alone")
    except SettingsError as error:
        raise document.error(("extends",), f"extends is {short_repr(wanted)}: {error.message}", error.hint) from error
    document.values.setdefault("name", Path(source).stem)  # it is not the other one
    return document.over(read_extended(base, base_source, find, chain))


def build(kind: type[T], document: Document) -> T:
    """A dataclass whose fields are the document's keys. Raises SettingsError with the file, line and key."""
    try:
        return _built(kind, document.values, ())
    except Misfit as error:
        raise document.error(error.key, error.message, error.hint) from error


def is_path(text: str) -> bool:
    """Whether it is meant as a file rather than as the name of a profile."""
    return text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text


def _text(file: Path | Traversable, source: str) -> str:
    try:
        with file.open("rb") as stream:
            data = read_bounded(stream, _MOST_BYTES)
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()  # any newline is read as \n
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source} is not UTF-8 text", _SMALL) from error
    except Unbounded as error:
        raise SettingsError(f"{source} {error}", _SMALL) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"cannot read {source}: {reason}", "check the profile's path") from error


def _not_yaml(place: str, problem: str) -> SettingsError:
    return SettingsError(f"{place}: not valid YAML: {problem}", "correct the file")


def _document(loader: yaml.SafeLoader, source: str) -> Document:
    """The values with the place of each key, down to where no profile has keys."""
    places: dict[Key, str] = {}

    def place(node: yaml.Node | None) -> str:
        return f"{source}, line {node.start_mark.line + 1 if node else 1}"

    def plain(node: yaml.Node) -> Any:
        try:
            return loader.construct_object(node, deep=True)
        except (ValueError, AttributeError, KeyError) as error:  # yaml lets a date or a truth that is none fall through
            raise _not_yaml(place(node), short_text(str(error))) from error

    def values(node: yaml.Node, key: Key) -> Any:
        if not isinstance(node, yaml.MappingNode) or len(key) == _DEPTH:
            return plain(node)
        found = {}
        for name_node, value_node in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else short_repr(plain(name_node))
            if name in found:
                message = f"{place(name_node)}: {dotted((*key, name))} is given twice"
                raise SettingsError(message, "remove one of the two")
            places[(*key, name)] = place(name_node)
            found[name] = values(value_node, (*key, name))
        return found

    root = loader.get_single_node()
    places[()] = place(root)
    if root is not None and (count := _values_below(root, {})) > _MOST_VALUES:
        message = f"{source}: {short_repr(count)} values when its aliases are written out"
        raise SettingsError(message, f"write a profile without aliases; {_MOST_VALUES:,} values are the most")
    return Document(None if root is None else values(root, ()), places)


def _values_below(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Count a node and all below it, as often as they are referred to, in time proportional to the text."""
    if node not in known:
        known[node] = 1  # for one that contains itself, which is refused where it is read
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for each in below for part in (each if isinstance(each, tuple) else (each,)))
        known[node] = 1 + sum(_values_below(part, known) for part in parts)
    return known[node]


def _base(wanted: Any, source: str, find: Callable[[str], Path | Traversable]) -> tuple[Path | Traversable, str]:
    """The file that `extends` names, and what messages call it."""
    if isinstance(wanted, int):  # 4090 is a name, too
        wanted = str(wanted)
    if not isinstance(wanted, str):
        raise SettingsError("not text", "name a profile, or a YAML file seen from this one")
    if is_path(wanted):
        path = Path(os.path.expanduser(source)).parent / os.path.expanduser(wanted)
        return path, str(path)
    file = find(wanted)
    return file, file.name


def _merged(base: Any, values: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(values, dict)):
        return values
    return base | {name: _merged(base.get(name), value) for name, value in values.items()}


def _built(kind: type[T], values: Any, key: Key) -> T:
    what = dotted(key) or "the file"
    if not isinstance(values, dict):
        raise Misfit(key, f"{what} is {short_repr(values)}, not keys and values", _SHIPPED)
    hints = get_type_hints(kind)
    refuse_unknown(values, list(hints), key)
    given = {}
    for name, value in values.items():
        part = next((each for each in (hints[name], *get_args(hints[name])) if is_dataclass(each)), None)
        if part is None:
            given[name] = _plain(value, (*key, name))
        elif value is not None:  # null is as good as absent
            given[name] = _built(part, value, (*key, name))
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [dotted((*key, name)) for name in required if name not in values]:
        raise Misfit(key, f"{', '.join(missing)} missing", _SHIPPED)
    return kind(**given)


def _plain(value: Any, key: Key) -> Any:
    """A value with its unit taken off: '24 GiB' under memory_gib, and '22GiB' in bytes under options.memory."""
    if key == ("options",) and isinstance(value, dict):
        return {name: _bytes(each, (*key, name)) for name, each in value.items()}
    unit = next((unit for suffix, unit in UNITS.items() if key[-1].endswith(suffix)), None)
    if unit is None or not isinstance(value, str):
        return value
    try:
        if not value.endswith(unit):
            raise ValueError
        return float(value.removesuffix(unit))
    except ValueError:
        message = f"{dotted(key)} is {short_repr(value)}, not a number of {unit}"
        raise Misfit(key, message, f"write a number without a unit, or with this one, such as 24 {unit}") from None


def _bytes(value: Any, key: Key) -> Any:
    if key[-1] not in _SIZES or not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except SettingsError as error:
        raise Misfit(key, f"{dotted(key)}: {error.message}", error.hint) from error
