"""The Typer app, and `run`, which runs one command line and prints every error as `error:` and `hint:`.

Importing this imports no torch: `triforce --help` and shell completion must answer at once.
"""

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, Exit, TyperException

from offload.errors import Degraded, RankLost, UsageError, typed_error

from .distributed import rank as ranks
from .options import config_file
from .options.config_file import unknown_variables
from .options.mistakes import PARSED, Command, Group, explained, name_variable
from .options.removed import refuse_unknown_command
from .options.settings import cache_home
from .output.terminal import Terminal
from .signals import DONE, FAILED, INTERRUPTED, WRONG_USE

_COMMANDS = {  # by name, the group in which the help shows each
    **dict.fromkeys(("generate", "summarize", "chat"), "Read a book"),
    "serve": "Serve",
    **dict.fromkeys(("profile", "models", "pull", "doctor", "cache"), "Models and this machine"),
    "bench": "Research",
}


def _app_with(commands: Iterable[str]) -> typer.Typer:
    """Return the app with some of the commands. Only their modules are imported: all of them take a second."""
    app = typer.Typer(
        name="triforce",
        cls=Group,
        help="Run a whole book through a long-context language model on the hardware you have.",
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_start)
    for name in commands:
        command = getattr(import_module(f".commands.{name}", __package__), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=_COMMANDS[name])
        else:
            app.command(cls=Command, rich_help_panel=_COMMANDS[name])(command)
    return app


@dataclass(frozen=True, slots=True)
class AppState:
    """The state of a command in `ctx.obj`: the terminal, and the cache folder (None for the platform's)."""

    terminal: Terminal
    home: Path | None


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"triforce {version('triforce')}")
        raise Exit(DONE)


def _start(
    ctx: typer.Context,
    color: Annotated[
        str, typer.Option(envvar="TRIFORCE_COLOR", help="auto, always or never; NO_COLOR is respected.")
    ] = "auto",
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if color not in ("auto", "always", "never"):
        raise UsageError(f"--color is {color!r}", "use auto, always or never")
    ctx.obj = AppState(ranks.terminal_for(ranks.world_position(os.environ), color), cache_home(os.environ))
    warnings.filterwarnings("always", category=Degraded)  # this library's own; those of others stay hidden
    warnings.showwarning = lambda message, *_: ctx.obj.terminal.warn(str(message))
    for warning in unknown_variables(os.environ):
        ctx.obj.terminal.warn(warning)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise Exit(WRONG_USE)


def _needed(args: Sequence[str]) -> Iterable[str]:
    """Return the commands that a command line needs: the first word, or all of them for help and suggestions."""
    if args[:1] == ["--version"]:
        return ()
    return args[:1] if args and args[0] in _COMMANDS else _COMMANDS


def _configured(args: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of the user's config.yaml, for a command that reads it. Raises SettingsError."""
    needed = args and args[0] in config_file.COMMANDS and not {"-h", "--help", "--help-all"} & set(args)
    return config_file.defaults(os.environ) if needed else {}


@cache  # for programs that run many command lines
def _command(names: tuple[str, ...]) -> Any:
    return typer.main.get_command(_app_with(names))


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Typer's own main is not used: it returns 1 for a closed pipe, and prints errors itself.
    """
    if "_TRIFORCE_COMPLETE" in os.environ:
        words = os.environ.get("_TRIFORCE_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")  # zsh and fish; bash
        _app_with(_needed(words.split()[1:]))()
    command = _command(tuple(_needed(args)))
    ctx = None
    try:
        refuse_unknown_command(args)
        with command.make_context("triforce", list(args), default_map=_configured(args)) as ctx:
            return command.invoke(ctx) or DONE
    except Exit as exit_:  # of help and version, which are printed
        return exit_.exit_code
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except BrokenPipeError:
        ranks.abandon()
        return _abandon_output()
    except SystemExit as exit_:  # rich's answer to a closed pipe, in --help
        return _abandon_output() if isinstance(exit_.__context__, BrokenPipeError) else int(exit_.code or DONE)
    except Exception as error:
        return _report(error, ctx.obj.terminal if ctx is not None and ctx.obj else Terminal(), ctx)


def _report(error: Exception, terminal: Terminal, ctx: Any = None) -> int:
    """Print error: and hint:, after the traceback if TRIFORCE_DEBUG is set; return the exit code."""
    terminal.trace(error)
    message, hint, code = _explain(error)
    hint = name_variable(message, hint, None if ctx is None else ctx.meta.get(PARSED))
    ranks.report(message, hint, code, isinstance(error, RankLost), terminal)
    return code


def _explain(error: Exception) -> tuple[str, str, int]:
    if isinstance(error, TyperException):
        where = getattr(error, "ctx", None)
        return *explained(error.format_message(), where), WRONG_USE
    if isinstance(error, OSError) and error.errno is not None:
        _abandon_output()  # or Python would try to write the rest again at exit
    typed = typed_error(error)
    return typed.message, typed.hint, WRONG_USE if isinstance(typed, UsageError) else FAILED


def _abandon_output() -> int:
    """Redirect stdout to nowhere and return success: the reader has closed the pipe (`| head`), which is not an error.

    Otherwise Python's flush at exit would print an error.
    """
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # a stream in memory
        pass
    return DONE


def settle_libraries() -> None:
    """Stop libraries from writing to the terminal; their errors arrive as exceptions."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not sys.stderr or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not os.environ.get("TRIFORCE_DEBUG"):
        warnings.simplefilter("ignore")
