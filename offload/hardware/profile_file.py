"""YAML profiles, read with the line of every key, so that each error names file, line and key."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml

from ..errors import SettingsError
from ..short_repr import short_repr, short_text
from ..system.files import Unbounded, read_bounded
from ..units import parse_size
from .schema import UNITS, InvalidValue, Key, dotted, refuse_unknown, type_hints

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # in other places before Python 3.11

_MAX_BYTES = 2**16  # of a file; a profile has about 1,000
_MAX_VALUES = 10_000  # in a file with its aliases expanded
# libyaml's loader is ten times as fast, and recurses on C's stack: only files that cannot be nested deeply get it. Each
# level takes one of these characters, or more spaces than the one above, of which a file has room for 361 levels.
_FlatFileLoader, _NESTING, _MOST_NESTING = getattr(yaml, "CSafeLoader", yaml.SafeLoader), "[{-?", 1600
_DEPTH = 2  # mappings in a profile: itself, and its parts
_SIZES = ("memory", "host_memory", "disk_limit", "cache_limit")  # options in bytes, which may be written as 22GiB
_SMALL_FILE = "it is to be a small YAML file"
_EXAMPLES = "see the profiles that come with the program"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document:
    """The values of a file; `places` has "mine.yaml, line 3" for each key, and for () the file's first line."""

    values: Any
    places: dict[Key, str]

    def error(self, key: Key, message: str, hint: str) -> SettingsError:
        """Return an error that begins with the line of a key, or of the mapping in which it is missing."""
        while key not in self.places:
            key = key[:-1]
        return SettingsError(f"{self.places[key]}: {message}", hint)

    def over(self, base: Document) -> Document:
        """Return this document merged over another: mappings key by key, everything else replaced."""
        return Document(_merged(base.values, self.values), base.places | self.places)


def read(file: Path | Traversable, source: str) -> Document:
    """Read one file, called `source` in messages.

    Raises SettingsError for invalid YAML, for keys given twice, and for aliases that expand to too many values.
    """
    text = _text(file, source)
    try:
        is_flat = sum(map(text.count, _NESTING)) <= _MOST_NESTING
        loader = (_FlatFileLoader if is_flat else yaml.SafeLoader)(text)
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
    """Read a file merged over the one that its `extends` names, and so on.

    Args:
        find: returns the file of a profile that comes with the program, by its name; raises SettingsError. A name that
            ends with .yaml or has a slash is a path, relative to the folder of the file that names it.
        above: the files that extend this one, to detect cycles.

    Raises SettingsError.
    """
    document = read(file, source)
    if not isinstance(document.values, dict) or "extends" not in document.values:
        return document
    wanted = document.values.pop("extends")
    chain = (*above, os.path.realpath(str(file)))
    try:
        base, base_source = _base(wanted, source, find)
        _text(base, base_source)  # an unreadable base is this file's error; an error inside the base is its own
        if os.path.realpath(str(base)) in chain:
            raise SettingsError("the files extend each other in a cycle", "let one of them stand alone")
    except SettingsError as error:
        raise document.error(("extends",), f"extends is {short_repr(wanted)}: {error.message}", error.hint) from error
    document.values.setdefault("name", Path(source).stem)  # not inherited
    return document.over(read_extended(base, base_source, find, chain))


def build(kind: type[T], document: Document) -> T:
    """Build a dataclass whose fields are the document's keys. Raises SettingsError with the file, line and key."""
    try:
        return _built(kind, document.values, ())
    except InvalidValue as error:
        raise document.error(error.key, error.message, error.hint) from error


def is_path(text: str) -> bool:
    """Return whether `text` is a file's path rather than a profile's name."""
    return text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text


def _text(file: Path | Traversable, source: str) -> str:
    try:
        with file.open("rb") as stream:
            data = read_bounded(stream, _MAX_BYTES)
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()  # any newline is read as \n
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source} is not UTF-8 text", _SMALL_FILE) from error
    except Unbounded as error:
        raise SettingsError(f"{source} {error}", _SMALL_FILE) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"cannot read {source}: {reason}", "check its path") from error


def _not_yaml(place: str, problem: str) -> SettingsError:
    return SettingsError(f"{place}: not valid YAML: {problem}", "correct the file")


def _document(loader: yaml.SafeLoader, source: str) -> Document:
    """Return the values and the line of each key, down to the depth of a profile's keys."""
    places: dict[Key, str] = {}

    def place(node: yaml.Node | None) -> str:
        return f"{source}, line {node.start_mark.line + 1 if node else 1}"

    def plain(node: yaml.Node) -> Any:
        try:
            return loader.construct_object(node, deep=True)
        except (ValueError, AttributeError, KeyError) as error:  # yaml raises these for invalid dates and booleans
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
    if root is not None and (count := _values_below(root, {})) > _MAX_VALUES:
        message = f"{source}: {short_repr(count)} values with its aliases expanded"
        raise SettingsError(message, f"write it without aliases; at most {_MAX_VALUES:,} values are read")
    return Document(None if root is None else values(root, ()), places)


def _values_below(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Count a node and all below it, once for each reference, in time proportional to the text."""
    if node not in known:
        known[node] = 1  # ends the recursion for a node that contains itself, which is refused when it is read
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for each in below for part in (each if isinstance(each, tuple) else (each,)))
        known[node] = 1 + sum(_values_below(part, known) for part in parts)
    return known[node]


def _base(wanted: Any, source: str, find: Callable[[str], Path | Traversable]) -> tuple[Path | Traversable, str]:
    """Return the file that `extends` names, and its name in messages."""
    if isinstance(wanted, int):  # YAML reads the name 4090 as a number
        wanted = str(wanted)
    if not isinstance(wanted, str):
        raise SettingsError("not text", "name a profile, or a YAML file relative to this one")
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
        raise InvalidValue(key, f"{what} is {short_repr(values)}, not keys and values", _EXAMPLES)
    hints = type_hints(kind)
    refuse_unknown(values, list(hints), key)
    given = {}
    for name, value in values.items():
        part = next((each for each in (hints[name], *get_args(hints[name])) if is_dataclass(each)), None)
        if part is None:
            given[name] = _plain(value, (*key, name))
        elif value is not None:  # null means absent
            given[name] = _built(part, value, (*key, name))
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [dotted((*key, name)) for name in required if name not in values]:
        raise InvalidValue(key, f"{', '.join(missing)} missing", _EXAMPLES)
    return kind(**given)


def _plain(value: Any, key: Key) -> Any:
    """Return a value without its unit: '24 GiB' under memory_gib, and '22GiB' in bytes under options.memory."""
    if key == ("options",) and isinstance(value, dict):
        return {name: plain_option(each, (*key, name)) for name, each in value.items()}
    unit = next((unit for suffix, unit in UNITS.items() if key[-1].endswith(suffix)), None)
    if unit is None or not isinstance(value, str):
        return value
    try:
        if not value.endswith(unit):
            raise ValueError
        return float(value.removesuffix(unit))
    except ValueError:
        message = f"{dotted(key)} is {short_repr(value)}, not a number of {unit}"
        raise InvalidValue(
            key, message, f"write a number without a unit, or with this one, such as 24 {unit}"
        ) from None


def plain_option(value: Any, key: Key) -> Any:
    """Return an option's value as its setting has it: sizes in bytes, and a tree as text. Raises InvalidValue."""
    if key[-1] == "tree" and type(value) is int:  # a number of nodes, which the option takes as text
        return str(value)
    if key[-1] not in _SIZES or not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except SettingsError as error:
        raise InvalidValue(key, f"{dotted(key)}: {error.message}", error.hint) from error
