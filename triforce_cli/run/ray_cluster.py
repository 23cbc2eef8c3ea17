"""A Ray cluster: joined for the time of a command, how many workers it has room for, and work that these do.

Ray restarts a worker that was killed and gives its row to another one.
"""

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from offload.errors import SettingsError, TriforceError, typed_error
from offload.units import counted

from ..distributed.rank import silent_terminal
from ..options.command_request import OutputOptions, Request
from ..output.batch_display import BatchDisplay
from .job import Job
from .model_request import ModelRequest, open_request, stretch
from .text_generator import TextGenerator

LOCAL = "local"  # the address of a cluster of this machine alone, which the command starts and ends
_CONNECT = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers a cluster has room for, and the CPU cores and GPUs of each."""

    count: int
    cpus: int
    gpus: int

    def __str__(self) -> str:
        each = counted(self.gpus, "GPU") if self.gpus else counted(self.cpus, "CPU core")
        return f"{counted(self.count, 'worker')} with {each} each"


ROW, RESULT = "row", "result"  # columns, of JSON


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What every worker is told: the request of the command, and the tokens of the longest sequence."""

    request: Request
    longest: int
    version: str


class LoadedWorker:
    """Works on rows over one loaded model: a class for `ray.data.Dataset.map_batches`.

    Attributes:
        failure: why this machine cannot work, which is the error of each row that it is given; None if it can.
    """

    def __init__(self, job: WorkerJob, output: OutputOptions) -> None:
        self.output, self.terminal = replace(output, quiet=True, verbose=0), silent_terminal()
        self.failure: TriforceError | None = None
        try:
            self._load(job)
            self.prepare()
        except Exception as error:  # of any kind: an actor that cannot be made would be made again and again
            failure = typed_error(error)
            self.failure = TriforceError(f"on {socket.gethostname()}: {failure.message}", failure.hint)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the results of rows in the column RESULT."""
        return {RESULT: np.array([json.dumps(self.work(json.loads(each))) for each in batch[ROW]])}

    def work(self, row: Any) -> Any:
        """Return the result of a row, for JSON."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Do what follows the loading of the model, and fails as it does."""

    def _load(self, job: WorkerJob) -> None:
        if version("triforce") != job.version:
            raise SettingsError(
                f"this machine has triforce {version('triforce')}, and the command is of {job.version}",
                "install the same version on every machine of the cluster",
            )
        self.opened = open_request(job.request, self.terminal, quiet=True)
        if job.request.extend_context:
            self.opened = replace(self.opened, model=stretch(self.opened.model, job.longest, self.terminal))
        display = BatchDisplay(self.terminal, shown=False)
        self.job = Job(self.opened, job.longest, self.terminal, self.output, display)
        loaded: list[TextGenerator] = []
        self.job.run(lambda load: loaded.append(load()))
        self.generator = loaded[0]


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join a Ray cluster, or start one for LOCAL, and leave it at the end. Raises SettingsError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what fails arrives as an exception
    try:
        import ray
        import ray.data
    except ImportError as error:
        hint = 'install it in the folder of triforce, on every machine: pip install ".[ray]"'
        raise SettingsError(f"--ray needs Ray Data: {error}", hint) from None
    try:
        _check_reachable(address)
        with _quiet_stderr():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError: of the address, or of other versions
        reason = " ".join(str(error).split())
        hint = f"start one with `ray start --head`, or use --ray {LOCAL} for this machine alone"
        raise SettingsError(f"--ray {address}: {reason}", hint) from None
    for name in ("ray.data", "ray"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    # Ray prints there that a worker has died: at once, or when it ends.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            yield
        finally:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise OSError unless something listens at host:port: Ray would try for minutes, and then end the process."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in address:
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discard what native code writes to stderr: Ray's says there which level of its log was set."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def workers_of(opened: ModelRequest) -> Workers:
    """Return the workers that the cluster has room for: one a GPU, else one for --threads cores or a machine's all.

    Raises SettingsError.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    engine = opened.settings.engine
    if engine.device != "cpu" and (gpus := int(sum(node.get("GPU", 0) for node in nodes))):
        return Workers(gpus, 0, 1)
    if engine.device == "cuda":
        raise SettingsError("--device cuda: the cluster has no GPU", "leave it out, or use --device cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise SettingsError("the cluster has neither GPUs nor CPU cores", "start a node with `ray start`")
    each = min(engine.threads or min(cores), max(cores))
    return Workers(sum(count // each for count in cores), each, 0)


def worker_job(opened: ModelRequest, longest: int, workers: Workers) -> WorkerJob:
    """Return what every worker is told, to answer prompts of up to `longest` tokens with their texts."""
    settings, model = opened.settings, Path(opened.settings.engine.model)
    if model.exists():  # workers have another working folder
        settings = replace(settings, engine=replace(settings.engine, model=str(model.absolute())))
    if workers.cpus:  # several workers share a machine's cores
        settings = replace(settings, engine=replace(settings.engine, threads=workers.cpus))
    return WorkerJob(replace(opened.request, settings=settings), longest, version("triforce"))


def mapped(
    rows: Sequence[str], worker: type[LoadedWorker], arguments: tuple[Any, ...], workers: Workers
) -> Iterator[str]:
    """Yield what workers, each made with the `arguments`, return for rows, as they come. Raises TriforceError."""
    if not rows:
        return
    import ray.data

    answered = ray.data.from_items([{ROW: row} for row in rows], override_num_blocks=len(rows)).map_batches(
        worker,
        fn_constructor_args=arguments,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers.count, len(rows))),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
    )
    try:
        for row in answered.iter_rows():
            yield row[RESULT]
    except (TriforceError, OSError):
        raise
    except Exception as error:  # what Ray raises of its own, such as for a machine without this package
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        hint = "the results so far are saved; `ray status` and the files in /tmp/ray/session_latest/logs say more"
        raise TriforceError(f"the Ray cluster failed: {reason}", hint) from error
