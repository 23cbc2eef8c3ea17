"""`triforce serve`: an OpenAI-compatible endpoint on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.errors import SettingsError
from offload.units import parse_size, parse_tokens, size_text

from ..distributed.launch import ranks_to_start
from ..distributed.rank import world_position
from ..options import declarations as options
from ..options import groups as option_groups
from ..options.declarations import AUTO, parse_parallel
from ..options.request import check_flags, parse_output_options, parse_request
from ..output.progress import ProgressDisplay
from ..serve import serve_options as defaults
from ..serve.serve_options import exposure, read_keys

_SERVER: dict[str, Any] = {"rich_help_panel": "Server", "show_default": False}
# What each request says for itself, or what one text alone has.
_OF_REQUESTS = ("system", "stop", "raw", "json", "verify", "show_thinking")


def _complete_scope(incomplete: str) -> list[str]:
    return [name for name in defaults.CACHE_SCOPES if name.startswith(incomplete)]


@option_groups.accepts({name: each for name, each in option_groups.GENERATION.items() if name not in _OF_REQUESTS})
def serve(
    ctx: typer.Context,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help=options.described("Address to listen on.", defaults.HOST), **_SERVER),
    ] = defaults.HOST,
    port: Annotated[
        int,
        typer.Option(
            metavar="N", help=options.described("0: any free.", str(defaults.PORT)), min=0, max=65535, **_SERVER
        ),
    ] = defaults.PORT,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys, one a line; or TRIFORCE_API_KEY.", **_SERVER)
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web page that may use it; repeatable.", **_SERVER)
    ] = None,
    cache_scope: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=options.described("shared, or key: none between keys.", "shared"),
            autocompletion=_complete_scope,
            **_SERVER,
        ),
    ] = "shared",
    parallel: Annotated[
        Any,
        typer.Option(
            metavar="N", help=options.described("Sequences at a time.", AUTO), parser=parse_parallel, **_SERVER
        ),
    ] = AUTO,
    queue: Annotated[
        int,
        typer.Option(
            metavar="N",
            help=options.described("Sequences that may wait.", str(defaults.QUEUE)),
            min=1,
            max=100_000,
            **_SERVER,
        ),
    ] = defaults.QUEUE,
    context: Annotated[
        Any,
        typer.Option(
            metavar="TOKENS",
            help=options.described("Longest prompt and answer.", "model's, to 128K"),
            parser=parse_tokens,
            **_SERVER,
        ),
    ] = None,
    max_body: Annotated[
        Any,
        typer.Option(
            metavar="SIZE",
            help=options.described("Longest request.", size_text(defaults.BODY)),
            parser=parse_size,
            **_SERVER,
        ),
    ] = None,
    drain: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            help=options.described("To end requests on SIGTERM.", str(defaults.DRAIN)),
            min=0,
            max=86_400,
            **_SERVER,
        ),
    ] = defaults.DRAIN,
    ignore_unknown: Annotated[
        bool, typer.Option("--ignore-unknown", help="Pass over unknown fields of requests.", **_SERVER)
    ] = False,
) -> int:
    """Serve the model to other programs, as an OpenAI-compatible endpoint.

    The model is loaded once. Requests run together and share what they begin with. Only this machine can use it, unless
    --host names another address, which needs an API key. A page at / takes a file and a question. Needs an extra: pip
    install ".\\[serve]".

    [bold]Examples[/bold]

      triforce serve

      triforce serve --model Llama-3.2-1B --context 32K --parallel 4

      triforce serve --host 0.0.0.0 --api-key-file keys.txt --cache-scope key

      curl http://127.0.0.1:8000/v1/models
    """
    check_flags(ctx)
    if cache_scope not in defaults.CACHE_SCOPES:
        hint = f"use one of: {', '.join(defaults.CACHE_SCOPES)}"
        raise SettingsError(f"--cache-scope is {cache_scope!r}", hint)
    listening = defaults.ServeOptions(
        *(host, port, read_keys(api_key_file, os.environ), tuple(cors or ())),
        *(cache_scope == "key", parallel, queue, context, max_body or defaults.BODY, drain, ignore_unknown),
    )
    defaults.check_installed()
    terminal, output = ctx.obj.terminal, parse_output_options(ctx)
    if api_key_file is not None and (warning := exposure(api_key_file)):
        terminal.warn(warning)
    request = parse_request(ctx)
    if ranks_to_start(request.settings) or world_position(os.environ) is not None:
        raise SettingsError("triforce serve runs in one process, and ranks are several", "use --tensor-parallel 1")
    display = ProgressDisplay(terminal, shown=not output.quiet)
    try:
        display.loading("starting")
        from ..serve.server import run_server  # from here on torch is needed

        return run_server(listening, request, terminal, output, display)
    finally:
        display.close()
