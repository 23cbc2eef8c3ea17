"""`triforce models`: lists and removes models on this machine, and lists the well-known ones."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from offload.architecture.known_models import KNOWN, is_current, weight_bytes
from offload.loading.hub.registry import HUB_MODELS
from offload.loading.hub.stored import StoredModel, stored_model, stored_models
from offload.system.machine import default_home
from offload.units import GIB

from ..options.mistakes import Command, Group
from ..output.cache_entries import ago
from ..output.format import size
from ..output.stdout_formats import json_line
from ..output.tables import Column, table

models = typer.Typer(cls=Group)
_CLASSES = (4, 8, 12, 16, 24, 48, 80, 160)  # GiB of a memory, for models by their weights
_STORED = (Column("on this machine", style="cyan"), Column("size", right=True), Column("used", right=True))
_KNOWN = (
    Column("to fetch", style="cyan"),
    Column("size", right=True),
    Column("context", right=True),
    Column("licence", least=16),
)
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@models.callback(invoke_without_command=True)
def _list(ctx: typer.Context, json: Json = False) -> None:
    """List the models on this machine, and those that can be fetched by name.

    `triforce profile` says which one is best here; `triforce pull` fetches one.

    [bold]Examples[/bold]

      triforce models

      triforce models rm Qwen/Qwen3-4B
    """
    if ctx.invoked_subcommand is not None:
        return
    terminal, stored = ctx.obj.terminal, stored_models(ctx.obj.home or default_home())
    if json:
        here = [
            {"name": model.name, "size": model.size, "used": model.used, "folder": model.folder} for model in stored
        ]
        known = [{"name": name, "size": weight_bytes(name), "context": KNOWN[name].context} for name in HUB_MODELS]
        terminal.write(json_line(type="models", stored=here, known=known))
        return
    rows = [(model.name, size(model.size), ago(time.time() - model.used)) for model in stored]
    text = table(_STORED, rows, terminal.table_width) if rows else Text("no model is on this machine yet\n")
    text.append("\n").append_text(table(_KNOWN, list(_known()), terminal.table_width))
    terminal.print(text.append("\ngated: accept the licence on the model's page, then `hf auth login`\n"))


def _known() -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of well-known models that run here, each memory class below a line of its own."""
    by_class: dict[int, list[str]] = {limit: [] for limit in (*_CLASSES, 0)}
    for name, model in HUB_MODELS.items():
        if not model.is_for_plans:
            limit = next((limit for limit in _CLASSES if weight_bytes(name) <= 0.8 * limit * GIB), 0)
            by_class[limit].append(name)
    for limit, names in by_class.items():
        yield f"for {limit} GiB" if limit else "for more", "", "", ""
        for name in sorted(
            names, key=lambda name: (not is_current(name), not HUB_MODELS[name].is_free, weight_bytes(name))
        ):
            licence, gated, _ = HUB_MODELS[name].note.partition("; gated")
            shown = f"gated: {licence}" if gated else licence  # first, or a narrow terminal cuts it off
            yield f"  {name}", size(weight_bytes(name)), f"{KNOWN[name].context:,}", shown


@models.command(cls=Command)
def rm(ctx: typer.Context, names: Annotated[list[str], typer.Argument(metavar="NAME")], json: Json = False) -> None:
    """Remove models from this machine."""
    home = ctx.obj.home or default_home()
    found: list[StoredModel] = [model for name in names for model in stored_model(name, home)]
    for model in found:
        model.remove()
    freed = sum(model.size for model in found)
    ctx.obj.terminal.write(json_line(type="models", removed=freed) if json else f"removed {size(freed)}\n")
