"""`triforce serve`: an OpenAI-compatible endpoint on this machine."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.errors import SettingsError
from offload.units import parse_size, parse_tokens, size_text

from ..distributed.rank import world_position
from ..options import declarations as options
from ..options.declarations import AUTO, parse_parallel
from ..options.request import check_flags, parse_output_options, parse_request
from ..output.progress import ProgressDisplay
from ..serve import serve_options as defaults
from ..serve.serve_options import read_keys


def _option(help: str, metavar: str | None, usual: object = None, *names: str, **more: Any) -> Any:
    """Return an option of the server, `usual` being its default in words."""
    text = help if usual is None else options.described(help, str(usual))
    return options.option(*names, help=text, metavar=metavar, **({"rich_help_panel": "Server"} | more))


_SHOWN: dict[str, Any] = {"rich_help_panel": None}  # by `--help`; the others by `--help-all` alone


# What each request says for itself, or what one text alone has.
_OF_REQUESTS = ("system", "stop", "raw", "json", "verify", "show_thinking")


@options.accepts({name: option for name, option in options.GENERATION.items() if name not in _OF_REQUESTS})
def serve(
    ctx: typer.Context,
    host: Annotated[str, _option("Address to listen on.", "ADDRESS", defaults.HOST, **_SHOWN)] = defaults.HOST,
    port: Annotated[int, _option("0: any free.", "N", defaults.PORT, min=0, max=65535, **_SHOWN)] = defaults.PORT,
    api_key_file: Annotated[
        Path | None, _option("API keys, one a line; or TRIFORCE_API_KEY.", "FILE", **_SHOWN)
    ] = None,
    cors: Annotated[list[str] | None, _option("Web page that may use it; repeatable.", "ORIGIN")] = None,
    parallel: Annotated[Any, _option("Sequences at a time.", "N", AUTO, parser=parse_parallel, **_SHOWN)] = AUTO,
    queue: Annotated[
        int, _option("Sequences that may wait.", "N", defaults.QUEUE, min=1, max=100_000)
    ] = defaults.QUEUE,
    context: Annotated[
        Any,
        _option("Longest prompt and answer.", "TOKENS", "model's, to 128K", "--context", parser=parse_tokens, **_SHOWN),
    ] = None,
    max_body: Annotated[
        Any, _option("Longest request.", "SIZE", size_text(defaults.BODY), "--max-body", parser=parse_size)
    ] = str(defaults.BODY),
    drain: Annotated[
        int, _option("To end requests on SIGTERM.", "SECONDS", defaults.DRAIN, min=0, max=86_400)
    ] = defaults.DRAIN,
    ignore_unknown: Annotated[
        bool, _option("Pass over unknown fields of requests.", None, None, "--ignore-unknown")
    ] = False,
) -> int:
    """Serve the model to other programs, as an OpenAI-compatible endpoint.

    The model is loaded once. Requests run together and share what they begin with. Only this machine can use it, unless
    --host names another address, which needs an API key. A page at / takes a file and a question. Needs an extra: pip
    install ".\\[serve]".

    [bold]Examples[/bold]

      triforce serve

      triforce serve --model Llama-3.2-1B --context 32K --parallel 4

      triforce serve --host 0.0.0.0 --api-key-file keys.txt

      curl http://127.0.0.1:8000/v1/models
    """
    check_flags(ctx)
    listening = defaults.ServeOptions(
        *(host, port, read_keys(api_key_file, os.environ), tuple(cors or ())),
        *(parallel, queue, context, max_body, drain, ignore_unknown),
    )
    defaults.check_installed()
    terminal, output = ctx.obj.terminal, parse_output_options(ctx)
    request = parse_request(ctx)
    if world_position(os.environ) is not None or request.settings.parallel.tensor_parallel not in (None, 1):
        raise SettingsError("triforce serve runs on one device", "leave --tensor-parallel and torchrun out")
    display = ProgressDisplay(terminal, shown=not output.quiet)
    try:
        display.loading("starting")
        from ..serve.server import run_server  # from here on torch is needed

        return run_server(listening, request, terminal, output, display)
    finally:
        display.close()
