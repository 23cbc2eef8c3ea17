"""Commands that accept other programs' names of options, and hints for mistyped commands and options."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import cleandoc
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from offload.errors import SettingsError

from .other_names import OPTIONS, SUBCOMMANDS, accepted, names_of, option_elsewhere, other_name

_COMMAND, _OPTION = re.compile(r"No such command '(.*?)'"), re.compile(r"No such option: (--?[\w-]+)")
_NUMBER = re.compile(r"Invalid value for '(--?[\w-]+).*': Input should be a valid (integer|number)")
_LIMIT = re.compile(r"Invalid value for '(--?[\w-]+).*': Input should be (greater|less) than or equal to (\S+)")
_MISSING = re.compile(r"Missing (?:option|argument) '([^']+)'")
_NO_VALUE = re.compile(r"Option '(--?[\w-]+)' requires an argument")
_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \((.*)\)", re.DOTALL)
_LINE_BREAK = re.compile(r"(?<!\n)\n(?![\n ])")  # within a paragraph; examples are indented
_CLOSE = 0.7  # --ctx-size is not --quantize
_TYPED = f"{__name__}.typed"  # of a context's `meta`: the command's own, and other names that were typed, by ours


def explained(message: str, commands: Callable[[], Mapping[str, Any]], ctx: Any) -> tuple[str, str]:
    """Return the message of a usage error in plain words, and a hint that names what was probably meant.

    `commands` returns all commands by name, slowly. `ctx` is the context of the command that could not be parsed; None
    where there is none.
    """
    where = ctx.command_path if ctx is not None else "triforce"
    see = f"see `{where} --help`"
    if match := _COMMAND.search(message):
        meant = _meant_command(match[1], list(getattr(ctx.command, "commands", ())), where)
        return f"there is no command {match[1]!r}", f"{meant}{see}"
    if match := _OPTION.search(message):
        known = [*(name for param in ctx.command.params for name in param.opts), "--help"]
        meant = _meant_option(match[1], known, ctx) or _elsewhere(match[1], commands(), where)
        return f"there is no option {match[1]}", f"{meant}{see}"
    if match := _EXTRA.search(message):
        has_files = "prompt_file" in ctx.params and "name" not in ctx.params
        return _extra_argument(match[1], ctx) if has_files else (f"{match[1]} is one argument too many", see)
    if match := _MISSING.search(message):
        return f"{match[1].rstrip('.')} is missing", see
    if match := _LIMIT.search(message):
        return f"{match[1]} takes numbers {'from' if match[2] == 'greater' else 'up to'} {match[3]}", see
    if match := _NUMBER.search(message):  # the library's own words name its types
        kind, example = ("a whole number", "8") if match[2] == "integer" else ("a number", "0.5")
        message, see = f"{match[1]} takes {kind}", f"such as {match[1]} {example}; {see}"
    if match := _NO_VALUE.search(message):
        return f"{match[1]} takes a value", see
    return message, see


def as_given(message: str, hint: str, meta: Mapping[str, Any]) -> tuple[str, str]:
    """Return an error that begins with an option with the name that was typed, or the variable that gave the value."""
    ctx, typed = meta.get(_TYPED, (None, {}))
    match = re.match(r"(?:Invalid value for ')?(?:--)?([\w-]+)", message)
    if match is None or ctx is None:
        return message, hint
    if match[1] in typed:
        return f"--{typed[match[1]]}{message[match.end() :]}", hint
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if f"--{match[1]}" in param.opts and source is not None and source.name == "ENVIRONMENT":
            hint = f"the value is that of the environment variable {param.envvar}; {hint}"
    return message, hint


def _meant_command(name: str, known: list[str], where: str) -> str:
    if where == "triforce" and (row := names_of(SUBCOMMANDS).get(name)) is not None:
        return f"use {row.hint}; "
    close = get_close_matches(name, known, 1)
    return f"did you mean {where} {close[0]}? " if close else ""


def _meant_option(name: str, known: list[str], ctx: Any) -> str:
    """Return the beginning of a hint: what another program's option is here, else one that is spelled nearly so."""
    if (row := other_name(name) or option_elsewhere(name)) is not None:
        return f"{_instead(row.hint, row.ours, known, ctx)}; "
    beginning = [each for each in known if each.startswith(name) and name.strip("-")]
    meant = min(beginning, key=len, default="") or next(iter(get_close_matches(name, known, 1, _CLOSE)), "")
    return f"did you mean {meant}? " if meant else ""


def _elsewhere(name: str, commands: Mapping[str, Any], where: str) -> str:
    """Return the beginning of a hint: the first command that has an option which this one does not have."""
    having = (each for each, command in commands.items() for param in command.params if name in param.opts)
    found = next(having, None) if name.startswith("--") else None  # one letter has other meanings there
    return f"`triforce {found}` has it, and `{where}` does not; " if found else ""


def _instead(hint: str, ours: str, known: Sequence[str], ctx: Any) -> str:
    """Return what to type instead of another program's option that a command does not accept."""
    if f"--{ours}" in known or not ours:
        return hint
    return hint or f"elsewhere that is --{ours}, which {ctx.command_path} does not have"


def refuse_other_short_options(given: Sequence[str], ctx: Any) -> None:
    """Raise SettingsError for an option such as -ngl, which would be read as -n with the value `gl`."""
    known = names_of(OPTIONS)
    wrong = next((each for each in given if each[:1] == "-" and each[1:2] != "-" and each in known), None)
    if wrong is not None:
        raise SettingsError(f"there is no option {wrong}", f"{known[wrong].hint}; see `{ctx.command_path} --help`")


def _extra_argument(extra: str, ctx: Any) -> tuple[str, str]:
    """Return the message and the hint for words behind the one argument, the prompt: a file, or no quotes."""
    prompt, where = ctx.params.get("prompt") or "", ctx.command_path
    message = f"{extra} is one more argument" + (" behind the prompt" if prompt else "")
    for file, rest in ((prompt, extra), (extra, prompt)):
        if is_file(file):
            meant = f"{where} -f {shlex.quote(file)} {_quoted(rest) if rest else ''}".rstrip()
            return f"{file} is a file, and is taken for text" if prompt else message, f"-f reads a file: {meant}"
    if not prompt:
        return message, f"give files with -f: {where} -f FILE"
    return message, f"quote the prompt: {where} {_quoted(f'{prompt} {extra}')}; -f FILE reads a file"


def warn_of_file(ctx: Any, prompt: str | None) -> None:
    """Warn if the prompt is the name of a file, which is not read, with the command that reads it."""
    if prompt is not None and is_file(prompt):
        line = f"{ctx.command_path} -f {shlex.quote(prompt)}"
        ctx.obj.terminal.warn(f"the prompt is the text {prompt!r}; to read the file of that name: {line}")


def _quoted(text: str) -> str:
    return f'"{text}"' if not set(text) & set('"\\$`!') else shlex.quote(text)


def is_file(text: str) -> bool:
    """Return whether a text names a file that exists."""
    try:
        return bool(text.strip()) and Path(text).is_file()
    except (OSError, ValueError):  # far too long for a name, or a NUL in it
        return False


class _Plain:
    """A switch has no value, so that its help shows no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Group(_Plain, TyperGroup):
    """A group of commands."""


class Command(_Plain, TyperCommand):
    """A command that accepts an option by another program's name, where that has an equal meaning."""

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:
        # A terminal breaks the lines of a paragraph, not the source.
        super().__init__(*args, help=help and _LINE_BREAK.sub(" ", cleandoc(help)), **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = (name for param in self.params for name in (*param.opts, *param.secondary_opts))
        own = frozenset(name[2:] for name in names if name.startswith("--"))

        def ours(name: str) -> str:
            found = accepted(name, own, self.name) if len(name) > 1 else name
            if found != name:
                typed[found] = name
            return found

        typed: dict[str, str] = {}
        ctx.meta[_TYPED] = ctx, typed
        ctx.token_normalize_func = ours
        given = args[: args.index("--")] if "--" in args else list(args)  # the parser takes from `args`
        try:
            rest = super().parse_args(ctx, args)
        except TyperException as error:
            refuse_other_short_options(given, ctx)
            error.ctx = ctx  # an option without its value names no command
            raise
        refuse_other_short_options([each for each in given if _is_value(each, ctx)], ctx)
        return rest


def _is_value(given: str, ctx: Any) -> bool:
    """Return whether an argument such as -fa was taken for -f with the value `a`, where there is no such file."""
    found = [ctx.params[param.name] for param in ctx.command.params if given[:2] in param.opts]
    values = [value for each in found for value in (each if isinstance(each, list | tuple) else [each])]
    return given[2:] in values and not Path(given[2:]).exists()
