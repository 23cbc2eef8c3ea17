"""The experiments that come with the program, and those of a user: YAML files, strictly read. Imports no torch."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import SettingsError
from offload.hardware.profile_file import is_path, read
from offload.hardware.schema import InvalidValue, did_you_mean
from offload.short_repr import short_repr

from ..input.plain_values import build
from .definition import Experiment

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # in other places before Python 3.11

ROOT = Path(__file__).resolve().parents[2]  # of a checkout or an editable install
BOOK = ROOT / "examples" / "frankenstein.txt"  # the text of quick runs; not part of a wheel


def available() -> list[str]:
    """Return the names of the experiments that come with the program."""
    return sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml"))


def load(name: str) -> Experiment:
    """Return an experiment by its name, or from a YAML file.

    Raises SettingsError for an unknown name, and with file, line and key for anything in the file that makes no sense.
    """
    if is_path(name):
        return _read(Path(name).expanduser(), name)
    if name not in available():
        hint = f"{did_you_mean(name, available())}experiments: {', '.join(available())}; or give a path to a YAML file"
        raise SettingsError(f"there is no experiment {short_repr(name)}", hint)
    return _read(_folder() / f"{name}.yaml", f"{name}.yaml")


def _read(file: Path | Traversable, source: str) -> Experiment:
    document = read(file, source)
    if document.values is None:
        raise SettingsError(f"{source} is empty", "see the experiments that come with the program")
    try:
        return build(Experiment, document.values)
    except InvalidValue as error:
        raise document.error(error.key, error.message, error.hint) from error


def _folder() -> Traversable:
    """Return triforce_cli/experiments of an installed wheel; experiments/ of a checkout or an editable install."""
    packaged = files("triforce_cli") / "experiments"
    return packaged if packaged.is_dir() else ROOT / "experiments"
