"""Reads YAML files, merged over those that they extend; each error names the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import SettingsError
from ..short_repr import short_text

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # in other places before Python 3.11

_MAX_BYTES = 2**16  # of a file; a profile has about 1,000
_MOST_EXTENDED = 8  # files that extend each other


def read(file: Path | Traversable, source: str) -> Any:
    """Return the values of a file, called `source` in messages. Raises SettingsError for invalid YAML."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise SettingsError(f"{source} has more than {_MAX_BYTES:,} bytes", "it is to be a small YAML file")
        return yaml.safe_load(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source} is not UTF-8 text", "it is to be a small YAML file") from error
    except OSError as error:
        raise SettingsError(f"cannot read {source}: {error.strerror}", "check its path") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as a day that no month has
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = f", line {mark.line + 1}" if mark else ""
        raise SettingsError(f"{source}{line}: not valid YAML: {short_text(problem)}", "correct the file") from error


def read_extended(
    file: Path | Traversable, source: str, find: Callable[[str], Path | Traversable], depth: int = 0
) -> Any:
    """Return the values of a file merged over the values of the file that its `extends` names, and so on.

    `find` returns the file of a profile that comes with the program, by its name; raises SettingsError. A name that
    ends with .yaml or has a slash is a path, relative to the folder of the file that names it. `depth` files extend
    this one. Raises SettingsError.
    """
    values = read(file, source)
    if not isinstance(values, dict) or "extends" not in values:
        return values
    wanted = str(values.pop("extends"))  # YAML reads the name 4090 as a number
    if depth == _MOST_EXTENDED:
        raise SettingsError(f"{source}: the files extend each other in a cycle", "let one of them stand alone")
    if is_path(wanted):
        base: Path | Traversable = Path(os.path.expanduser(source)).parent / os.path.expanduser(wanted)
        base_source = str(base)
    else:
        try:
            base = find(wanted)
        except SettingsError as error:
            raise SettingsError(f"{source} extends {wanted}: {error.message}", error.hint) from error
        base_source = base.name
    values.setdefault("name", Path(source).stem)  # not inherited
    return _merged(read_extended(base, base_source, find, depth + 1), values)


def is_path(text: str) -> bool:
    """Return whether `text` is a file's path rather than a profile's name."""
    return text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text


def _merged(base: Any, values: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(values, dict)):
        return values
    return base | {name: _merged(base.get(name), value) for name, value in values.items()}
