"""Hints for mistyped commands and options."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

_INSTEAD = {  # what other programs call it
    "run": 'triforce generate "a prompt"',
    "complete": 'triforce generate "a prompt"',
    "ask": 'triforce summarize book.txt --question "Who tells it?"',
    "list": "triforce cache list for cached prompts, or triforce doctor for models",
    "ls": "triforce cache list for cached prompts, or triforce doctor for models",
    "rm": "triforce cache rm ID",
    "download": "triforce pull",
    "benchmark": "triforce bench",
    "plan": "triforce profile",
    "info": "triforce doctor",
}
_COMMAND, _OPTION = re.compile(r"No such command '(.*?)'"), re.compile(r"No such option: (--?[\w-]+)")


def explained(message: str, ctx: Any, param: Any = None) -> tuple[str, str]:
    """Return the message of a usage error in plain words, and a hint that names what was probably meant.

    `ctx` is the context of the command that could not be parsed, `param` the parameter with the wrong value; None where
    there is none.
    """
    where = ctx.command_path if ctx is not None else "triforce"
    see = f"see `{where} --help`"
    if match := _COMMAND.search(message):
        meant = _meant_command(match[1], list(getattr(ctx.command, "commands", ())), where)
        return f"there is no command {match[1]!r}", f"{meant}{see}"
    if match := _OPTION.search(message):
        meant = _meant_option(match[1], [name for param in ctx.command.params for name in param.opts])
        return f"there is no option {match[1]}", f"did you mean {meant}? {see}" if meant else see
    if ctx is not None and param is not None and _is_from_environment(ctx, param):
        return message, f"the value is that of the environment variable {param.envvar}; {see}"
    return message, see


def _is_from_environment(ctx: Any, param: Any) -> bool:
    source = ctx.get_parameter_source(param.name)
    return source is not None and source.name == "ENVIRONMENT"


def _meant_command(name: str, known: list[str], where: str) -> str:
    if where == "triforce" and name in _INSTEAD:
        return f"use {_INSTEAD[name]}; "
    close = get_close_matches(name, known, 1)
    return f"did you mean {where} {close[0]}? " if close else ""


def _meant_option(name: str, known: list[str]) -> str:
    """Return the option that begins so, else one that is spelled nearly so; "" without any."""
    beginning = [each for each in known if each.startswith(name) and name.strip("-")]
    return min(beginning, key=len, default="") or next(iter(get_close_matches(name, known, 1)), "")
