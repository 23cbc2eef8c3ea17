"""A batch on a Ray cluster: its lines in pieces to workers, each with a loaded model, and the results as they come.

Ray restarts a worker that was killed, with the piece that it had. Each result is written here, once; a piece whose
results did not arrive is answered by the same command again.
"""

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offload.errors import SettingsError, TriforceError, typed_error
from offload.settings.config import EngineConfig
from offload.units import counted

from ..distributed.rank import silent_terminal
from ..options.declarations import AUTO
from ..options.request import OutputOptions, Request
from ..output.batch_display import BatchDisplay
from ..run.opened_request import open_request, stretch
from ..run.parallel import MOST
from ..run.run import Run
from .batch_run import BatchRun
from .items import BadLine, BatchItem, NumberedLine, parse_line
from .result_file import ERROR, error_line

LOCAL = "local"  # the address of a cluster of this machine alone, which the command starts and ends
_CONNECT = 5.0  # seconds
_RESTARTS = 10  # of a worker
_BEGINNING = 1024  # characters that prompts of one document have in common
_PIECES = 4  # for each worker at least, so that all end at about the same time


class Worker:
    """Answers pieces of a batch over one loaded model: the class of an actor.

    What keeps its machine from working is the error of each line that it is given.
    """

    def __init__(
        self, request: Request, output: OutputOptions, parallel: int | str, longest: int, command_version: str
    ) -> None:
        """Load the model of a command's request for sequences of up to `longest` tokens."""
        self._output, self._terminal = replace(output, quiet=True, verbose=0), silent_terminal()
        self._failure: TriforceError | None = None
        try:
            if version("triforce") != command_version:
                message = f"this machine has triforce {version('triforce')}, and the command is of {command_version}"
                raise SettingsError(message, "install the same version on every machine of the cluster")
            self._opened = open_request(request, self._terminal, quiet=True)
            if request.extend_context:
                self._opened = replace(self._opened, model=stretch(self._opened.model, longest, self._terminal))
            display = BatchDisplay(self._terminal, shown=False)
            self._run = Run(self._opened, longest, self._terminal, self._output, display)
            self._parallel = self._run.parallel(parallel)
            self._run.load()
        except Exception as error:  # of any kind: an actor that cannot be made would be made again and again
            failure = typed_error(error)
            self._failure = TriforceError(f"on {socket.gethostname()}: {failure.message}", failure.hint)

    def answers(self, lines: Sequence[NumberedLine]) -> list[str]:
        """Return the results of lines, as lines of JSON."""
        items = [parse_line(*line) for line in lines]
        if (failure := self._failure) is not None:
            return [error_line(item.line, item.id, failure.message, failure.hint) for item in items]
        results: list[str] = []
        display = BatchDisplay(self._terminal, shown=False)
        batch = BatchRun(items, results.append, True, self._opened, self._terminal, self._output, display)
        batch.run(self._run, self._parallel)
        return results


def run_on_cluster(address: str, run: BatchRun, texts: Mapping[int, str], longest: int, parallel: int | str) -> int:
    """Answer the items of a batch on a cluster; return the exit code. Raises TriforceError.

    `texts` are the lines of the file by their numbers.
    """
    display, engine = run.display, run.opened.settings.engine
    display.loading(f"looking for the Ray cluster {address}")
    with _joined(address):
        count, cpus, gpus = _workers(engine)
        for item in run.items:
            if isinstance(item, BadLine):
                run.fail(item.line, item.id, False, item.error)
        work = pieces([item for item in run.items if isinstance(item, BatchItem)], count, parallel)
        if not run.output.quiet:
            resources = counted(gpus, "GPU") if gpus else counted(cpus, "CPU core")
            run.terminal.note(
                f"{counted(count, 'worker')} with {resources} each, {counted(len(work), 'piece')} of work"
            )
        display.hide()
        display.expect(len(run.items))
        display.loading(f"loading {engine.model}")
        lines = [[(number, texts[number]) for number in piece] for piece in work]
        request = _for_workers(run.opened.request, cpus)
        arguments = request, run.output, parallel, longest, version("triforce")
        try:
            for result in _answered(lines, arguments, count, {"num_cpus": cpus, "num_gpus": gpus}):
                event = json.loads(result)
                if event["type"] == ERROR:
                    run.fail(event["line"], event["id"], False, TriforceError(event["message"], event["hint"]))
                else:
                    run.write(result)
                    display.count(event["new_tokens"], event["prompt_tokens"])
        except KeyboardInterrupt:
            run.interrupted()
            raise
    return run.ended(counted(count, "worker"))


@contextmanager
def _joined(address: str) -> Iterator[None]:
    """Join a Ray cluster, or start one for LOCAL, and leave it at the end. Raises SettingsError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what fails arrives as an exception
    try:
        import ray
    except ImportError as error:
        hint = 'install it in the folder of triforce, on every machine: pip install ".[ray]"'
        raise SettingsError(f"--ray needs Ray: {error}", hint) from None
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "/" not in address:  # else Ray tries for minutes, and ends the process
            socket.create_connection((host, int(port)), timeout=_CONNECT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, include_dashboard=False)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError: of the address, or of other versions
        hint = f"start one with `ray start --head`, or use --ray {LOCAL} for this machine alone"
        raise SettingsError(f"--ray {address}: {' '.join(str(error).split())}", hint) from None
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Ray prints there that a worker has died
        try:
            yield
        finally:
            ray.shutdown()


def _workers(engine: EngineConfig) -> tuple[int, int, int]:
    """Return how many workers the cluster has room for, and the CPU cores and GPUs of each.

    They are one a GPU, else one for --threads cores or a machine's all. Raises SettingsError.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if engine.device != "cpu" and (gpus := int(sum(node.get("GPU", 0) for node in nodes))):
        return gpus, 0, 1
    if engine.device == "cuda":
        raise SettingsError("--device cuda: the cluster has no GPU", "leave it out, or use --device cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise SettingsError("the cluster has neither GPUs nor CPU cores", "start a node with `ray start`")
    cpus = min(engine.threads or min(cores), max(cores))
    return sum(count // cpus for count in cores), cpus, 0


def _answered(
    pieces: Sequence[Sequence[NumberedLine]], arguments: tuple[Any, ...], count: int, resources: Mapping[str, int]
) -> Iterator[str]:
    """Yield the results of `count` workers for pieces of a batch, as they come. Raises TriforceError."""
    import ray
    from ray.util import ActorPool

    actor = ray.remote(max_restarts=_RESTARTS, max_task_retries=_RESTARTS, **resources)(Worker)
    pool = ActorPool([actor.remote(*arguments) for _ in range(min(count, len(pieces)))])
    try:
        for results in pool.map_unordered(lambda worker, lines: worker.answers.remote(lines), pieces):
            yield from results
    except (TriforceError, OSError):
        raise
    except Exception as error:  # what Ray raises of its own, such as for a machine without this package
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        hint = "the results so far are saved; `ray status` and the files in /tmp/ray/session_latest/logs say more"
        raise TriforceError(f"the Ray cluster failed: {reason}", hint) from error


def _for_workers(request: Request, cpus: int) -> Request:
    """Return the request as workers need it: they have another working folder, and share a machine's cores."""
    engine = request.settings.engine
    if Path(engine.model).exists():
        engine = replace(engine, model=str(Path(engine.model).absolute()))
    if cpus:
        engine = replace(engine, threads=cpus)
    return replace(request, settings=replace(request.settings, engine=engine))


def pieces(items: Sequence[BatchItem], workers: int, parallel: int | str) -> list[list[int]]:
    """Divide the items into pieces, each for one worker; return their lines. A common beginning makes neighbours."""
    order: dict[str, list[int]] = {}
    for item in items:
        order.setdefault(f"{item.system or ''}\n{item.prompt[:_BEGINNING]}", []).append(item.line)
    most = MOST if parallel == AUTO else int(parallel)
    size = max(min(most, -(-len(items) // (workers * _PIECES))), 1)
    ordered = [line for group in order.values() for line in group]
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]
