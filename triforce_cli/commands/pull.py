"""`triforce pull`: fetch a model ahead of time."""

from typing import Annotated

import typer

from offload.settings.config import DEFAULT_MODEL

from ..output.progress import DownloadBar


def pull(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name such as Qwen3-4B-2507, a hub id, or id:Q4_K_M.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model ahead of time, with a progress bar, and print its path.

    `triforce models` lists names.

    [bold]Examples[/bold]

      triforce pull

      triforce pull Qwen/Qwen3-0.6B

      triforce pull unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M
    """
    from offload.loading.formats.tensor_checks import check_tensors
    from offload.loading.hub.download import describe_source, locate, open_checkpoint

    terminal = ctx.obj.terminal
    if source := describe_source(name):
        terminal.note(source)
    with DownloadBar(terminal) as progress:
        path = locate(name, ctx.obj.home, progress, refresh=True)
    check_tensors(open_checkpoint(path))
    terminal.write(f"{path}\n")
