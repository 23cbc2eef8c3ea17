"""What other programs call things, and what they are called here: the rows of other_names.tsv. Imports nothing heavy.

A name of equal meaning is accepted; for any other there is a hint that says what to type instead.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

OPTIONS, SUBCOMMANDS = "options", "subcommands"  # of the command line
COMMANDS, FIELDS = "commands", "fields"  # of a chat, of requests to serve
_AS_ABOVE = '"'


class OtherName(NamedTuple):
    """A name that people know from another program.

    Attributes:
        name: without the dashes of a long option, with one dash for a short one; - stands for _ too.
        programs: which call it so.
        ours: the option of equal meaning, without dashes; "" if there is none.
        hint: what to type instead, said by commands that do not accept the name.
        commands: those that accept it, if they have the option `ours`; all where empty.
    """

    name: str
    programs: str
    ours: str = ""
    hint: str = ""
    commands: tuple[str, ...] = ()


def names_of(kind: str) -> dict[str, OtherName]:
    """Return the rows of a kind by their names, such as OPTIONS."""
    return _tables()[kind]


@cache
def _tables() -> dict[str, dict[str, OtherName]]:
    tables: dict[str, dict[str, OtherName]] = {}
    hint = ""
    for line in Path(__file__).with_suffix(".tsv").read_text("utf-8").splitlines():
        if line.startswith("["):
            rows = tables[line.strip("[]")] = {}
        elif line and not line.startswith("#"):
            name, programs, ours, said, commands = (line.split("\t") + [""] * 3)[:5]
            hint = hint if said == _AS_ABOVE else said or hint
            assert name not in rows, f"{name} twice"
            rows[name] = OtherName(name, programs, ours, said and hint, tuple(commands.split()))
    return tables


def other_name(typed: str) -> OtherName | None:
    """Return the row of a name: an option with its dashes, a field of a request, or a command of a chat."""
    if typed.startswith("/"):
        return names_of(COMMANDS).get(typed)
    name = typed if typed.startswith("-") and not typed.startswith("--") else typed.lstrip("-").replace("_", "-")
    return names_of(OPTIONS).get(name)


def option_elsewhere(typed: str) -> OtherName | None:
    """Return the row whose hint tells what to type instead of an option that only other commands have."""
    ours = typed.lstrip("-")
    return next((row for row in names_of(OPTIONS).values() if ours and row.ours == ours and row.hint), None)


def accepted(typed: str, own: set[str] | frozenset[str], command: str) -> str:
    """Return the long option that a command has for a long one as typed, without dashes; as typed if it has none.

    `own`: the command's own long options, without dashes.
    """
    name = typed.replace("_", "-")
    if typed in own or name in own:
        return typed if typed in own else name
    row = names_of(OPTIONS).get(name)
    is_meant = row is not None and row.ours in own and command in (row.commands or (command,))
    return row.ours if is_meant else typed
