"""`triforce pull`: fetch a model ahead of time."""

from typing import Annotated

import typer

from offload.settings.config import DEFAULT_MODEL

from ..output.progress import DownloadBar
from ..output.tables import Column, table


def pull(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name such as Llama-2-7B-128K, a hub id, or a folder.")] = DEFAULT_MODEL,
    list_: Annotated[bool, typer.Option("--list", help="List the well-known models, and fetch nothing.")] = False,
) -> None:
    """Fetch a model ahead of time, with a progress bar, and print its path.


    [bold]Examples[/bold]

      triforce pull

      triforce pull --list

      triforce pull Qwen/Qwen3-0.6B

      triforce pull Llama-2-7B-128K
    """
    from offload.loading.formats.tensor_checks import check_tensors
    from offload.loading.hub.download import describe_source, locate, open_checkpoint
    from offload.loading.hub.registry import HUB_MODELS

    terminal = ctx.obj.terminal
    if list_:
        rows = [(name, f"{model.id}: {model.note}") for name, model in HUB_MODELS.items()]
        columns = (Column("", style="cyan"), Column("", least=16))
        terminal.print(table(columns, [(DEFAULT_MODEL, "embedded"), *rows], terminal.table_width, headed=False))
        return
    if source := describe_source(name):
        terminal.note(source)
    with DownloadBar(terminal) as progress:
        path = locate(name, ctx.obj.home, progress, refresh=True)
    check_tensors(open_checkpoint(path))
    terminal.write(f"{path}\n")
