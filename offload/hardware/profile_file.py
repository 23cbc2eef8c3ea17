"""Reads YAML files; each error names the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from ..errors import SettingsError
from ..short_repr import short_text

_MAX_BYTES = 2**16  # of a file; a profile has about 1,000


def read(file: Path, source: str) -> Any:
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


def is_path(text: str) -> bool:
    """Return whether `text` is a file's path rather than a profile's name."""
    return text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text


def merged(base: Any, values: Any) -> Any:
    """Return a profile's values over those of another, key by key."""
    if not (isinstance(base, dict) and isinstance(values, dict)):
        return values
    return base | {name: merged(base.get(name), value) for name, value in values.items()}
