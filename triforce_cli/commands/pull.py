"""`triforce pull`: fetch a model ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.config import DEFAULT_MODEL

from ..output.download_bar import DownloadBar


def pull(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The embedded model's name or a hub id.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model ahead of time, with a progress bar, and print its path.

    [bold]Examples[/bold]

      triforce pull

      triforce pull smollm2-135m

      triforce pull Qwen/Qwen3-0.6B
    """
    from offload.loading.hub import locate, open_checkpoint
    from offload.loading.tensor_checks import check_tensors

    terminal = ctx.obj.terminal
    with DownloadBar(terminal) as progress:
        path = locate(name, ctx.obj.home, progress, refresh=True)
    check_tensors(open_checkpoint(path))
    terminal.write(f"{path}\n")
