"""Loads the model, serves it until SIGTERM or Ctrl-C, and ends what runs."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from offload.errors import InternalError, SettingsError, typed_error
from offload.settings.method_sizes import forgets
from offload.units import counted

from ..options.checks import approximation_warnings
from ..options.request import OutputOptions, Request
from ..output.terminal import Terminal
from ..run.opened_request import OpenedRequest, open_request, stretch
from ..run.run import Display, Run
from ..signals import DONE
from .app import create_app
from .engine_thread import EngineThread
from .sequences import ServedModel
from .serve_options import ServeOptions
from .server_metrics import ServerMetrics

MOST_CONTEXT = 128 * 1024  # tokens that are planned for unless more are asked for
_OTHERS = 64  # connections beside those of sequences: the page, /health, and whoever is about to ask
_GRACE = 2  # seconds that answers have to be sent after --drain
_LABEL = "triforce serve"  # of prompts in the prompt cache: what clients send is not shown in lists


def run_server(
    options: ServeOptions, request: Request, terminal: Terminal, output: OutputOptions, display: Display
) -> int:
    """Serve until a signal; return the exit code. Raises TriforceError for what is wrong before that."""
    alone = replace(request.settings, parallel=replace(request.settings.parallel, tensor_parallel=1))
    request = replace(request, settings=alone)  # one of the GPUs that a profile describes serves
    opened = open_request(request, terminal, output.quiet)
    opened, context = _with_context(opened, options.context, terminal)
    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    run = Run(opened, context, terminal, output, display)
    parallel = run.parallel(options.parallel)
    if request.dry_run:
        return run.print_plan()
    with contextlib.closing(_bound(options.host, options.port)) as listener:
        run.load()
        if run.prompt_cache is not None:
            run.prompt_cache.label = _LABEL
        display.close()
        for warning in approximation_warnings(opened.settings):
            terminal.warn(warning)
        metrics, report, model = ServerMetrics(), partial(_report, terminal), ServedModel(opened, context)
        engine = EngineThread(run.engine, parallel, options.queue, metrics.ended, report)
        metrics.watch(engine)
        host = f"[{options.host}]" if ":" in options.host else options.host
        together = f"{counted(parallel, 'sequence')} at a time, {options.queue:,} may wait"
        note = f"{model.name} at http://{host}:{listener.getsockname()[1]}/v1 ({together}); Ctrl-C ends it"
        say = terminal.note if not output.quiet else lambda text: None
        app = create_app(model, engine, metrics, options, report, say)
        server = HttpServer(app, engine, parallel + options.queue, options.drain, partial(say, note))
        has_ended = server.run_until_signalled(listener)
        say(metrics.total())
    if engine.error is not None:
        raise engine.error
    if not has_ended:  # threads run on, and a tokenizer's would crash if the interpreter went away under it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(DONE)
    return DONE


def _report(terminal: Terminal, error: Exception) -> None:
    """Print an error that clients are not told; the server goes on."""
    terminal.trace(error)
    typed = typed_error(error)
    hint = "TRIFORCE_DEBUG=1 shows where" if isinstance(typed, InternalError) else typed.hint
    terminal.error(typed.message, f"{hint}; the server goes on")


def _with_context(opened: OpenedRequest, wanted: int | None, terminal: Terminal) -> tuple[OpenedRequest, int]:
    """Return the request and the tokens of the longest sequence, with the model's context extended if that was asked.

    Raises SettingsError if the model has fewer.
    """
    if wanted is not None and opened.request.extend_context:
        opened = replace(opened, model=stretch(opened.model, wanted, terminal))
    if wanted is not None and wanted > opened.context and not forgets(opened.settings.speculation):
        message = f"--context {wanted:,} is more than the model's context of {counted(opened.context, 'token')}"
        raise SettingsError(message, "ask for less, or add --extend-context")
    return opened, min(opened.context, MOST_CONTEXT) if wanted is None else wanted


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet: until the model is loaded, connections are refused.

    Raises SettingsError if the address is taken or is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            if os.name == "posix":  # elsewhere it would let two servers have one port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
        return listener
    except OSError as error:
        hint = "use --port with another number, or --port 0 for any free one; --host is an address of this machine"
        raise SettingsError(f"cannot listen on {host} port {port}: {error.strerror or error}", hint) from error


class HttpServer(uvicorn.Server):
    """uvicorn's server over a running engine: the first signal drains, a second one ends at once, both with code 0."""

    should_exit: bool

    def __init__(
        self, app: Starlette, engine: EngineThread, sequences: int, drain: int, announce: Callable[[], None]
    ) -> None:
        """`announce` is called when the server listens; `drain` is the seconds that requests have after a signal."""
        self._engine, self._drain, self._announce = engine, drain, announce
        limits = {"limit_concurrency": sequences + _OTHERS}
        quiet = {"log_config": None, "log_level": "critical", "access_log": False, "server_header": False}
        plain = {"lifespan": "off", "ws": "none", "http": "h11", "proxy_headers": False}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=drain + _GRACE, **limits, **quiet, **plain))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for requests; answer those that are left after the time for it, before uvicorn breaks them off."""
        message = "the server is shutting down"
        timer = asyncio.get_running_loop().call_later(self._drain, self._engine.fail, message)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int | None = None, frame: FrameType | None = None) -> None:
        """Stop accepting connections and end when requests have ended; called again, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def run_until_signalled(self, listener: socket.socket) -> bool:
        """Run the engine and the server until a signal; return whether the engine has ended."""
        self._engine.gave_up = self.handle_exit
        self._engine.start()
        asyncio.run(self.serve([listener]))
        return self._engine.stop(timeout=0 if self.force_exit else _GRACE)
