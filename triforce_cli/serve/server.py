"""Loads the model, serves it until SIGTERM or Ctrl-C, and ends what runs."""

import asyncio
import contextlib
import errno
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from offload.errors import InternalError, SettingsError, TriforceError, typed_error
from offload.settings.method_sizes import forgets
from offload.units import counted

from ..distributed.rank import finish, when_lost
from ..options.command_request import OutputOptions, Request
from ..options.mode_checks import approximation_warnings
from ..output.terminal import Terminal
from ..run.job import Display, Job, Load
from ..run.model_request import ModelRequest, open_request, stretch
from ..signals import DONE, is_ignored, listen
from .connections import HEAD_BYTES, Connection, Places, reserve_descriptors
from .endpoint import ServedModel, create_app
from .engine_thread import EngineThread
from .guard import address_text
from .ranks import Leader, follow
from .sequences import PromptEncoder
from .serve_options import ServeOptions
from .server_metrics import ServerMetrics

MOST_CONTEXT = 128 * 1024  # tokens that are planned for unless more are asked for
_GRACE = 2  # seconds that answers have to be sent after --drain
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_QUIET = 60  # seconds between two reports of that
_LABEL = "triforce serve"  # of prompts in the prompt cache: what clients send is not shown in lists


def run_server(
    options: ServeOptions, request: Request, terminal: Terminal, output: OutputOptions, display: Display
) -> int:
    """Serve until a signal; return the exit code. Raises TriforceError for what is wrong before that."""
    opened = open_request(request, terminal, output.quiet)
    opened, context = _with_context(opened, options.context, terminal)
    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    job = Job(opened, context, terminal, output, display)
    parallel = job.parallel(options.parallel)

    def work(load: Load) -> None:
        group = request.group
        if group is not None and group.rank > 0:
            follow(load().engine, group, opened.model.checkpoint.load_tokenizer())
            return
        with contextlib.closing(_bound(options.host, options.port)) as listener:
            generator = load()
            if generator.prompt_cache is not None:
                generator.prompt_cache.label = _LABEL
            display.close()
            for warning in _warnings(opened):
                terminal.warn(warning)
            metrics = ServerMetrics()
            report = partial(_report, terminal)
            leader = None if group is None else Leader(group)
            engine = EngineThread(generator.engine, parallel, options.queue, metrics.ended, report, leader)
            when_lost(lambda rank: engine.fail(f"rank {rank} has ended"))
            metrics.watch(engine)
            model = served_model(opened, context)
            address = address_text(options.host, listener.getsockname()[1])

            def announce() -> None:
                if output.quiet:
                    return
                together = f"{counted(parallel, 'sequence')} at a time, {options.queue:,} may wait"
                terminal.note(f"{model.name} at {address}/v1 ({together}); Ctrl-C ends it")

            limits = reserve_descriptors(parallel + options.queue)
            app = create_app(model, engine, metrics, options, report, limits)
            have_ended = serve_until_signalled(app, engine, listener, options.drain, announce)
        if engine.error is not None:
            raise engine.error
        if not have_ended:
            _exit_now()

    return job.run(work)


def served_model(opened: ModelRequest, context: int) -> ServedModel:
    """Return a model by the last part of its name, with a tokenizer for each of the two threads that need one."""
    path = Path(opened.settings.engine.model)
    name = path.resolve().name if path.exists() else opened.settings.engine.model
    return ServedModel(name, PromptEncoder(opened, context), opened.model.checkpoint.load_tokenizer(), context)


def _warnings(opened: ModelRequest) -> Iterator[str]:
    """Yield what changes the answers."""
    if level := opened.settings.engine.quantize:
        yield f"--quantize {level} changes the model: answers are those of rounded weights"
    yield from approximation_warnings(opened.settings)


def _exit_now() -> None:
    """End the process while threads run: a tokenizer's would crash if the interpreter went away under it."""
    finish(DONE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(DONE)


def _report(terminal: Terminal, error: Exception) -> None:
    """Print an error that clients are not told; the server goes on."""
    terminal.trace(error)
    found = typed_error(error)
    hint = "TRIFORCE_DEBUG=1 shows where" if isinstance(found, InternalError) else found.hint
    terminal.error(found.message, f"{hint}; the server goes on")


def _with_context(opened: ModelRequest, wanted: int | None, terminal: Terminal) -> tuple[ModelRequest, int]:
    """Return the request and the tokens of the longest sequence, with the model's context extended if that was asked.

    Raises SettingsError if the model has fewer.
    """
    if wanted is not None and opened.request.extend_context:
        opened = replace(opened, model=stretch(opened.model, wanted, terminal))
    if wanted is not None and wanted > opened.context and not forgets(opened.settings.speculation):
        raise SettingsError(
            f"--context {wanted:,} is more than the model's context of {counted(opened.context, 'token')}",
            "ask for less, or add --extend-context",
        )
    return opened, min(opened.context, MOST_CONTEXT) if wanted is None else wanted


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet: until the model is loaded, connections are refused.

    Raises SettingsError if the address is taken or is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        hint = "use 127.0.0.1, or an address of this machine"
        raise SettingsError(f"--host {host}: {error.strerror or error}", hint) from error
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        hint = "use --port with another number, or --port 0 for any free one"
        raise SettingsError(f"cannot listen on {host} port {port}: {error.strerror or error}", hint) from error
    return found


class HttpServer(uvicorn.Server):
    """uvicorn's server, with our signals: the first one drains, a second one ends at once."""

    def __init__(self, app: Starlette, drain: int, announce: Callable[[], None]) -> None:
        """`announce` is called when the server listens; `drain` is the seconds that requests have after a signal."""
        self._expire, self._drain, self.has_expired = app.state.expire, drain, False
        self._report, self._reported_at = app.state.report, -math.inf
        limits = app.state.limits
        # Not warnings: whoever sends what is no HTTP would fill the log.
        settings = {
            "log_config": None,
            "log_level": "error",
            "access_log": False,
            "server_header": False,
            "lifespan": "off",
            "ws": "none",
            "http": partial(Connection, Places(limits.most)),
            "h11_max_incomplete_event_size": HEAD_BYTES,
            "backlog": limits.backlog,
        }
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=drain + _GRACE, proxy_headers=False, **settings))
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        await super().startup(sockets)
        self._announce()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report what the event loop could not do; connections that it cannot accept, which it tries again, rarely."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif loop.time() >= self._reported_at + _QUIET:
            self._reported_at = loop.time()
            self._report(_not_accepted(error))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for requests; answer those that are left after the time for it, before uvicorn breaks them off."""
        timer = asyncio.get_running_loop().call_later(self._drain, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _end_requests(self) -> None:
        self.has_expired = True
        self._expire()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; afterwards as the command does."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name) and not (name == "SIGHUP" and is_ignored(signal.SIGHUP)):
                signal.signal(getattr(signal, name), lambda number, frame: self.end())
        try:
            yield
        finally:
            listen()

    def end(self) -> None:
        """Stop accepting connections and end when requests have ended; called again, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _not_accepted(error: OSError) -> TriforceError:
    hint = "end other programs, or give the server more memory"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit of open files before triforce serve: ulimit -n 4096"
    found = TriforceError(f"connections wait to be accepted: {error.strerror or error}", hint)
    found.__cause__ = error
    return found


def serve_until_signalled(
    app: Starlette, engine: EngineThread, listener: socket.socket, drain: int, announce: Callable[[], None]
) -> bool:
    """Run the engine and the server; after a signal, end what is queued and running within `drain` seconds.

    Returns whether all threads that encode and generate have ended. Called by the main thread, which alone receives
    signals.
    """
    server = HttpServer(app, drain, announce)
    engine.gave_up = server.end
    engine.start()
    asyncio.run(server.serve([listener]))
    left = _GRACE if server.has_expired else drain
    return engine.stop(timeout=0 if server.force_exit else left) and not app.state.encoding.is_busy
