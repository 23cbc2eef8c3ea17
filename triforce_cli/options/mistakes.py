"""The classes of commands, and hints for mistyped commands, options and prompts."""

import re
import shlex
from difflib import get_close_matches
from inspect import cleandoc
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from .removed import refuse_unknown_options

_COMMAND, _OPTION = re.compile(r"No such command '(.*?)'"), re.compile(r"No such option: (--?[\w-]+)")
_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \((.*)\)", re.DOTALL)
_PLAIN = {  # other messages of typer, in plain words
    re.compile(r"Missing (?:option|argument) '([^']+?)\.*'"): "{} is missing",
    re.compile(r"Invalid value for '(--?[\w-]+).*': Input should be (?:a valid )?(.+)"): "{} is to be {}",
    re.compile(r"Option '(--?[\w-]+)' requires an argument"): "{} takes a value",
}
_LINE_BREAK = re.compile(r"(?<!\n)\n(?![\n ])")  # within a paragraph; examples are indented
_CLOSE = 0.7  # --ctx-size is not --quantize
PARSED = f"{__name__}.parsed"  # of a context's `meta`: the context of the command
WORDS = f"{__name__}.words"  # and the words typed behind its name


def explained(message: str, ctx: Any) -> tuple[str, str]:
    """Return the message of a usage error in plain words, and a hint that names what was probably meant.

    `ctx` is the context of the command that could not be parsed; None where there is none.
    """
    where = ctx.command_path if ctx is not None else "triforce"
    see = f"see `{where} --help`"
    if match := _COMMAND.search(message):
        close = get_close_matches(match[1], list(getattr(ctx.command, "commands", ())), 1)
        close = [f"summarize {shlex.quote(match[1])}"] if is_file(match[1]) else close
        return f"there is no command {match[1]!r}", "".join(f"did you mean {where} {name}? " for name in close) + see
    if match := _OPTION.search(message):
        known = [*(name for param in ctx.command.params for name in param.opts), "--help"]
        return f"there is no option {match[1]}", f"{_meant_option(match[1], known)}{see}"
    if match := _EXTRA.search(message):
        if "prompt_file" in ctx.params and "name" not in ctx.params:
            return _extra_argument(match[1], ctx)
        return f"{match[1]} is one argument too many", see
    for pattern, plain in _PLAIN.items():
        if match := pattern.search(message):
            return plain.format(*match.groups()).replace("integer", "whole number"), see
    return message, see


def _meant_option(name: str, known: list[str]) -> str:
    """Return the beginning of a hint: an option that begins so, or is spelled nearly so."""
    longer = sorted((option for option in known if option.startswith(name) and name.strip("-")), key=len)
    close = longer or get_close_matches(name, known, 1, _CLOSE)
    return f"did you mean {close[0]}? " if close else ""


def _extra_argument(extra: str, ctx: Any) -> tuple[str, str]:
    """Return the message and the hint for words behind the one argument, the prompt: a file, or no quotes."""
    prompt, where = ctx.params.get("prompt") or "", ctx.command_path
    message = f"{extra} is one more argument" + (" behind the prompt" if prompt else "")
    for file, other in ((prompt, extra), (extra, prompt)):
        if is_file(file):
            meant = f"{where} -f {shlex.quote(file)} {shlex.quote(other) if other else ''}".rstrip()
            return f"{file} is a file, and is taken for text" if prompt else message, f"-f reads a file: {meant}"
    if not prompt:
        return message, f"give files with -f: {where} -f FILE"
    return message, f"quote the prompt: {where} {shlex.quote(f'{prompt} {extra}')}; -f FILE reads a file"


def name_variable(message: str, hint: str, ctx: Any) -> str:
    """Return the hint of an error that begins with an option, with the environment variable that gave the value."""
    match = re.match(r"(?:Invalid value for ')?(?:--)?([\w-]+)", message)
    if match is None or ctx is None:
        return hint
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if f"--{match[1]}" in param.opts and source is not None and source.name == "ENVIRONMENT":
            return f"the value is that of the environment variable {param.envvar}; {hint}"
    return hint


def warn_of_file(ctx: Any, prompt: str | None) -> None:
    """Warn if the prompt is the name of a file, which is not read, with the command that reads it."""
    if prompt is not None and is_file(prompt):
        line = f"{ctx.command_path} -f {shlex.quote(prompt)}"
        ctx.obj.terminal.warn(f"the prompt is the text {prompt!r}; to read the file of that name: {line}")


def is_file(text: str) -> bool:
    """Return whether a text names a file that exists."""
    try:
        return bool(text.strip()) and Path(text).is_file()
    except (OSError, ValueError):  # far too long for a name, or a NUL in it
        return False


def _without_types(params: list[Any]) -> list[Any]:
    """Return the parameters; the help shows no type for a switch or an argument."""
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda **_: None
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Command(TyperCommand):
    """A command whose errors say what to use in place of removed and of other programs' options."""

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:
        # A terminal breaks the lines of a paragraph, not the source.
        super().__init__(*args, help=help and _LINE_BREAK.sub(" ", cleandoc(help)), **more)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, without the options that stand in panels unless all are wanted."""
        wants_all = "--help-all" in ctx.meta.get(WORDS, ())
        rare = [] if wants_all else [param for param in self.params if getattr(param, "rich_help_panel", None)]
        for param in rare:
            param.hidden = True
        self.epilog = f"{ctx.command_path} --help-all shows {len(rare)} more options." if rare else None
        try:
            super().format_help(ctx, formatter)
        finally:
            for param in rare:
                param.hidden = False

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.token_normalize_func = lambda name: name.replace("_", "-") if len(name) > 1 else name
        ctx.meta[PARSED], ctx.meta[WORDS] = ctx, tuple(args)
        given = args[: args.index("--")] if "--" in args else list(args)  # the parser takes from `args`
        if "--help-all" in given:
            return super().parse_args(ctx, ["--help"])
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        refuse_unknown_options(given, own)
        try:
            return super().parse_args(ctx, args)
        except TyperException as error:
            vars(error)["ctx"] = ctx  # an option without its value names no command
            raise
