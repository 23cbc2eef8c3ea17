"""A Ray cluster: joined for the time of a command, how many workers it has room for, and work that these do.

Ray restarts a worker that was killed and gives its row to another one.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from offload.errors import SettingsError, TriforceError
from offload.settings.config import EngineConfig
from offload.units import counted

LOCAL = "local"  # the address of a cluster of this machine alone, which the command starts and ends
_CONNECT = 5.0  # seconds
ROW, RESULT = "row", "result"  # columns, of JSON


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers a cluster has room for, and the CPU cores and GPUs of each."""

    count: int
    cpus: int
    gpus: int

    def __str__(self) -> str:
        each = counted(self.gpus, "GPU") if self.gpus else counted(self.cpus, "CPU core")
        return f"{counted(self.count, 'worker')} with {each} each"


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
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "/" not in address:  # else Ray tries for minutes, and ends the process
            socket.create_connection((host, int(port)), timeout=_CONNECT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError: of the address, or of other versions
        hint = f"start one with `ray start --head`, or use --ray {LOCAL} for this machine alone"
        raise SettingsError(f"--ray {address}: {' '.join(str(error).split())}", hint) from None
    for name in ("ray.data", "ray"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Ray prints there that a worker has died
        try:
            yield
        finally:
            ray.shutdown()


def workers_of(engine: EngineConfig) -> Workers:
    """Return the workers that the cluster has room for: one a GPU, else one for --threads cores or a machine's all.

    Raises SettingsError.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if engine.device != "cpu" and (gpus := int(sum(node.get("GPU", 0) for node in nodes))):
        return Workers(gpus, 0, 1)
    if engine.device == "cuda":
        raise SettingsError("--device cuda: the cluster has no GPU", "leave it out, or use --device cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise SettingsError("the cluster has neither GPUs nor CPU cores", "start a node with `ray start`")
    each = min(engine.threads or min(cores), max(cores))
    return Workers(sum(count // each for count in cores), each, 0)


def mapped(rows: Sequence[str], worker: type, arguments: tuple[Any, ...], workers: Workers) -> Iterator[str]:
    """Yield what workers, made with the `arguments`, return in RESULT for each ROW, as it comes. Raises TriforceError.

    `worker` is a class for `ray.data.Dataset.map_batches`.
    """
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
