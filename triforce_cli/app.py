"""The Typer app, and run(): arguments -> exit code, every error told in the same two lines.

Importing this imports no torch: `triforce --help` and shell completion must answer at once.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from typer.exceptions import Abort, Exit, TyperException

from offload.errors import Degraded, RankLost, TriforceError, UsageError

from .commands.bench import bench
from .commands.cache import cache
from .commands.doctor import doctor
from .commands.generate import generate
from .commands.profile import profile
from .commands.pull import pull
from .commands.summarize import summarize
from .distributed import rank as ranks
from .exit_codes import DONE, FAILED, INTERRUPTED, WRONG_USE
from .options.context import Context, cache_home
from .output.terminal import Terminal

app = typer.Typer(
    name="triforce",
    help="Run a whole book through a long-context language model on the hardware you have.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(summarize)
app.command()(bench)
app.command()(pull)
app.command()(profile)
app.command()(doctor)
app.add_typer(cache, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triforce {version('triforce')}")
        raise Exit(DONE)


@app.callback(invoke_without_command=True)
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
    ctx.obj = Context(ranks.terminal_of(ranks.place(os.environ), color), cache_home(os.environ))
    _pass_on(ctx.obj.terminal)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise Exit(WRONG_USE)


def _pass_on(terminal: Terminal) -> None:
    """What the library warns of is for the user; what other libraries warn of is not."""
    warnings.filterwarnings("always", category=Degraded)
    warnings.showwarning = lambda message, *_: terminal.warn(str(message))


def run(args: Sequence[str]) -> int:
    """One command line -> its exit code. Typer's own main would turn a closed pipe into 1 and speak for itself."""
    if "_TRIFORCE_COMPLETE" in os.environ:
        app()
    command = typer.main.get_command(app)
    ctx = None
    try:
        with command.make_context("triforce", list(args)) as ctx:
            return command.invoke(ctx) or DONE
    except Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except BrokenPipeError:
        ranks.abandon()
        return _abandon_output()
    except SystemExit as exit_:  # rich's answer to a closed pipe, in --help
        return _abandon_output() if isinstance(exit_.__context__, BrokenPipeError) else int(exit_.code or DONE)
    except Exception as error:
        return _report(error, ctx.obj.terminal if ctx is not None and ctx.obj else Terminal())


def _report(error: Exception, terminal: Terminal) -> int:
    """error: and hint:, after the traceback for those who ask for it."""
    if os.environ.get("TRIFORCE_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    message, hint, code = _explain(error)
    ranks.report(message, hint, code, isinstance(error, RankLost), terminal)
    return code


def _explain(error: Exception) -> tuple[str, str, int]:
    if isinstance(error, TriforceError):
        return error.message, error.hint, WRONG_USE if isinstance(error, UsageError) else FAILED
    if isinstance(error, TyperException):
        ctx = getattr(error, "ctx", None)
        where = ctx.command_path if ctx is not None else "triforce"
        return error.format_message(), f"see `{where} --help`", WRONG_USE
    if isinstance(error, MemoryError) or ("alloc" in str(error).lower() and "memory" in str(error).lower()):
        return f"out of memory: {_first_line(error)}", "use a shorter prompt or a smaller model", FAILED
    if isinstance(error, OSError) and error.errno is not None:
        _abandon_output()  # what could not be written must not be tried again at exit
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}", "look at the disk, the permissions and where the output goes", FAILED
    hint = "this is a bug in triforce; TRIFORCE_DEBUG=1 shows where"
    return f"{type(error).__name__}: {_first_line(error)}", hint, FAILED


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["(no message)"])[0]


def _abandon_output() -> int:
    """The reader has gone (`| head`): not an error. Python's own flush at exit must not complain either."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # there is none: closed before we began
        pass
    return DONE


def settle_libraries() -> None:
    """Libraries must not write into our output; what they have to say arrives as exceptions."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not sys.stderr or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not os.environ.get("TRIFORCE_DEBUG"):
        warnings.simplefilter("ignore")
