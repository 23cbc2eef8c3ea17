"""`triforce cache`: lists and removes cached prompts."""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from offload.errors import SettingsError
from offload.prompt_cache.entries import Entry, entries
from offload.prompt_cache.folder import PromptFolder
from offload.settings.config import Caching
from offload.units import parse_size, size_text

from ..options import declarations as options
from ..options.mistakes import Command, Group
from ..options.settings import given_options
from ..output.cache_entries import entries_table
from ..output.stdout_formats import json_line
from ..run.prompt_cache import prompt_folder
from ..signals import WRONG_USE

cache = typer.Typer(cls=Group)

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _parse_age(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{text!r} is not an age", "write it like 30m, 12h, 7d or 4w")
    return float(match[1]) * _SECONDS[match[2].lower()]


_ID_HELP = "An id from `triforce cache list`, or the beginning of one."
_Id = typer.Argument(metavar="ID", help=_ID_HELP)
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
_LIMIT = options.chosen("set")


def _folder(ctx: typer.Context) -> PromptFolder:
    limit = given_options(ctx)[0].get("cache_limit")
    return prompt_folder(ctx.obj.home, Caching().cache_limit if limit is None else limit)


def _size(folder: PromptFolder) -> int:
    return sum(block.size for block in folder.blocks())


def _fields(entry: Entry) -> dict[str, object]:
    """Return an entry's fields for --json, with its files by path."""
    return asdict(entry) | {"blocks": [str(block.path) for block in entry.blocks]}


@cache.callback(invoke_without_command=True)
def _start(ctx: typer.Context) -> None:
    """Manage the prompt cache: the KV of prompts, saved on disk."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(WRONG_USE)


@cache.command("list", cls=Command)
@options.accepts(_LIMIT)
def list_(ctx: typer.Context, json: Json = False) -> None:
    """List cached prompts, the most recently used first.

    Prompts that share more than half of their text, such as questions about one document, are one line.
    """
    terminal, folder = ctx.obj.terminal, _folder(ctx)
    shown = entries(folder)
    if json:
        facts = {"folder": str(folder.path), "limit": folder.limit, "size": _size(folder)}
        terminal.write(json_line(type="cache", **facts, entries=[_fields(entry) for entry in shown]))
    else:
        terminal.print(entries_table(shown, folder, time.time(), terminal.table_width))


def _find(known: Sequence[Entry], id: str) -> Entry:
    """Return the entry whose id begins so. Raises SettingsError for none and for several."""
    matching = [entry for entry in known if id and entry.id.startswith(id.lower())]
    if len(matching) != 1:
        message = "no entry in the prompt cache begins" if not matching else f"{len(matching)} entries begin"
        raise SettingsError(f"{message} with {id!r}", "see `triforce cache list`")
    return matching[0]


@cache.command(cls=Command)
def rm(ctx: typer.Context, ids: Annotated[list[str], _Id], json: Json = False) -> None:
    """Remove entries from the prompt cache.

    Blocks that a removed entry shares with others are kept.

    [bold]Examples[/bold]

      triforce cache rm 3f2a
    """
    folder = _folder(ctx)
    known = entries(folder)
    removed = {entry.id: entry for entry in (_find(known, id) for id in ids)}
    kept = {block.path for entry in known if entry.id not in removed for block in entry.blocks}
    sizes = {block.path: block.size for entry in removed.values() for block in entry.blocks if block.path not in kept}
    for path in sizes:
        folder.remove(path)
    _print_removed(ctx, sum(sizes.values()), json)


_TO = options.option("--to", parser=parse_size, metavar="SIZE", help="Shrink to this size.", show_default="the limit")
_OLDER = options.option(
    "--older-than", parser=_parse_age, metavar="AGE", help="Remove entries not used for this long, such as 12h or 7d."
)


@cache.command(cls=Command)
@options.accepts(_LIMIT)
def prune(
    ctx: typer.Context,
    to: Annotated[int | None, _TO] = None,
    older_than: Annotated[float | None, _OLDER] = None,
    json: Json = False,
) -> None:
    """Remove the least recently used entries, and files of interrupted runs.

    Without an option, the cache shrinks to its limit.

    [bold]Examples[/bold]

      triforce cache prune --to 5GiB

      triforce cache prune --older-than 7d
    """
    folder = _folder(ctx)
    if older_than is not None:
        removed = folder.shrink(to or 0, before=time.time() - older_than)
    else:
        removed = folder.shrink(folder.limit if to is None else to)
    _print_removed(ctx, removed, json)


@cache.command(cls=Command)
def clear(
    ctx: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove everything from the prompt cache."""
    terminal, folder = ctx.obj.terminal, _folder(ctx)
    if not yes:
        if not (terminal.stdin_is_terminal and terminal.stderr_is_terminal):
            raise SettingsError("clearing the prompt cache needs a confirmation", "use --yes")
        size = size_text(_size(folder))
        if not typer.confirm(f"Remove {size} of prompts in {folder.path}?", err=True):
            return
    _print_removed(ctx, folder.clear(), json)


def _print_removed(ctx: typer.Context, size: int, json: bool) -> None:
    if json:
        ctx.obj.terminal.write(json_line(type="cache", removed=size))
    else:
        ctx.obj.terminal.note(f"{size_text(size)} removed")
