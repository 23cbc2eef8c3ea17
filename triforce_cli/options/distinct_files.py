"""Checks that a command overwrites no file that it reads, nor one of its outputs by another. Imports nothing heavy."""

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import typer

from offload.errors import SettingsError

from ..output.output_files import check_file

Named = tuple[str, Path | str | None]  # the option, and the file that it names, if any
_NO_FILE = (OSError, RuntimeError, ValueError)  # raised for a name of no file: an error where it is opened


def check_distinct(inputs: Iterable[Named], outputs: Iterable[Named]) -> None:
    """Raise SettingsError if an output is an input or another output. Files that are not regular are left out.

    Names of no file, such as a hub's model or - for standard input, are no inputs.
    """
    written = [(option, str(name)) for option, name in outputs if name is not None]
    read = [(option, str(name)) for option, name in inputs if name is not None and _is_file(str(name))]
    pairs = [*((one, other) for one in read for other in written), *combinations(written, 2)]
    for (option, name), (other, other_name) in pairs:
        if _is_same(name, other_name):
            both = f"{option} {name} and {other} {other_name}".lstrip()
            raise SettingsError(f"{both} are the same file", f"give {other} another file: it would be overwritten")


def check_output(name: str | None, inputs: Iterable[Named]) -> Path | None:
    """Return the file of --output; None for stdout, which is - too.

    Raises SettingsError for a file that is read or cannot be written.
    """
    if name in (None, "-"):
        return None
    check_distinct(inputs, [("--output", name)])
    path = Path(name).expanduser()
    if path.is_dir() or not path.exists():
        check_file(path, "--output", "answer.txt")
    return path


def named_files(ctx: typer.Context) -> list[Named]:
    """Return the options of a command that may name a file to read, but for its prompts."""
    return [(f"--{name}", ctx.params[name]) for name in ("model", "draft", "profile") if name in ctx.params]


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except _NO_FILE:
        return False


def _is_same(name: str, other: str) -> bool:
    try:
        one, two = Path(name).expanduser(), Path(other)
        if one.exists() and two.exists():
            return one.is_file() and one.samefile(two)
        return one.resolve() == two.resolve()
    except _NO_FILE:
        return False
