"""Starts the ranks of a group on this machine, and reports how their processes ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from offload.errors import SettingsError
from offload.system.machine import usable_cores

from ..output.terminal import Terminal
from ..signals import FAILED, INTERRUPTED, SIGNALLED, WRONG_USE, listen
from .rank import FOLDER, LAUNCHER, world_position

if TYPE_CHECKING:
    from ..options.settings import Settings

GRACE = 30.0  # seconds for ranks to end after a signal


def ranks_to_start(settings: Settings) -> int:
    """Return how many ranks this process must start; 0 if it is a rank itself, or runs alone.

    As many as were asked for, else as many as the profile's GPUs, if they are present. Raises SettingsError.
    """
    if world_position(os.environ) is not None:
        return 0
    asked, profile = settings.parallel.tensor_parallel, settings.profile
    on_cpu = settings.engine.device == "cpu" or (settings.engine.device == "auto" and profile.device == "cpu")
    if asked == 1 or (asked is None and (on_cpu or profile.gpus < 2)):
        return 0
    import torch

    count = asked or profile.gpus
    if settings.engine.device == "cpu" or not (present := torch.cuda.device_count()):
        if settings.engine.device == "cuda":
            return 0  # opening the model raises the error that there is no GPU
        return count if asked else 0
    if present >= count:
        return count
    if asked is None:
        return 0
    raise SettingsError(
        f"{count} ranks need {count} GPUs, and torch sees {present} here",
        f"use --tensor-parallel {present}, --device cpu, or torchrun on several machines",
    )


def launch(count: int, settings: Settings, home: Path | None, terminal: Terminal) -> int:
    """Run this same command line in `count` processes; return the exit code."""
    _fetch(settings, home, terminal)
    _check_heads(settings, home, count)
    with TemporaryDirectory(prefix="triforce-ranks-") as name:  # only its owner can read and write it
        folder = Path(name)
        command = [sys.executable, "-m", "triforce_cli", *sys.argv[1:]]
        try:
            failed = run_processes(count, command, _environment(folder, count), folder)
        except (KeyboardInterrupt, SystemExit) as ended:
            code = INTERRUPTED if isinstance(ended, KeyboardInterrupt) else int(ended.code or 0)
            own = _exit_code_of_rank_0(folder)
            return code if own is None else own
        if failed:
            return _report_failure(folder, failed, terminal)
        return _exit_code_of_rank_0(folder) or 0


def _fetch(settings: Settings, home: Path | None, terminal: Terminal) -> None:
    """Fetch the models before the ranks start, so that only one process downloads. Raises TriforceError."""
    from offload.loading.hub.download import locate
    from offload.settings.method_sizes import has_draft_model

    from ..output.progress import DownloadBar

    with DownloadBar(terminal, shown=terminal.shows_progress) as progress:
        locate(settings.engine.model, home, progress)
        source = settings.speculation.draft_source
        if source is not None and has_draft_model(settings.speculation):
            locate(source, home, progress)


def _check_heads(settings: Settings, home: Path | None, count: int) -> None:
    """Raise SettingsError for more ranks than the model has heads, before the processes are started."""
    from offload.architecture.hf_config import read_shape
    from offload.loading.hub.download import locate, open_checkpoint
    from offload.parallel import split

    path = locate(settings.engine.model, home)
    config = path / "config.json"
    split(read_shape(config) if config.is_file() else open_checkpoint(path).shape, 0, count)


def _environment(folder: Path, count: int) -> dict[str, str]:
    """Return the environment of the ranks, as far as they share it."""
    threads = max(1, usable_cores() // count)
    usual = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return usual | dict(os.environ) | {FOLDER: str(folder), LAUNCHER: str(os.getpid())}


def _exit_code_of_rank_0(folder: Path) -> int | None:
    """Return rank 0's exit code if it ended by itself, and so has printed its own errors; None otherwise."""
    file = folder / "code"
    return int(file.read_text("utf-8")) if file.exists() else None


def _report_failure(folder: Path, codes: dict[int, int], terminal: Terminal) -> int:
    """Print why the ranks have failed, unless rank 0 has printed it; return the exit code."""
    if (code := _exit_code_of_rank_0(folder)) is not None:
        return code
    if terminal.shows_progress:
        terminal.draw("\r\x1b[K")  # a killed rank may have left a progress bar
    reports = [_read(file) for file in sorted(folder.glob("error-*.json"), key=lambda file: file.stat().st_mtime)]
    for report in (report for report in reports if not report["lost"]):
        prefix = "" if report["code"] == WRONG_USE else f"rank {report['rank']}: "
        terminal.error(prefix + report["message"], report["hint"])
        return report["code"]
    expected = (0, FAILED, SIGNALLED + signal.SIGTERM, -signal.SIGTERM)
    rank, code = next(((r, c) for r, c in codes.items() if c not in expected), next(iter(codes.items())))
    if code < 0:
        name = signal.Signals(-code).name
        terminal.error(
            f"rank {rank} was killed by {name}",
            "it may have run out of memory; the text written so far is correct",
        )
    else:
        terminal.error(f"rank {rank} has ended with exit code {code}{_last_stderr_line(folder, rank)}", "")
    return FAILED


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def _last_stderr_line(folder: Path, rank: int) -> str:
    file = stderr_file(folder, rank)
    lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
    return f": {lines[-1].strip()}" if lines else ""


_POLL = 0.05  # seconds


def stderr_file(folder: Path, rank: int) -> Path:
    """Return the file that has what a rank beside rank 0 has written to stderr."""
    return folder / f"rank-{rank}.stderr"


def run_processes(
    count: int, command: Sequence[str], environment: Mapping[str, str], folder: Path, grace: float = GRACE
) -> dict[int, int]:
    """Run a command in `count` processes until all have succeeded or one has failed; then end the others.

    Only rank 0 has this process' streams. Returns the exit codes of the ranks that failed first, by rank; negative ones
    are signals. Signals that end this process are sent on to the ranks, and raised when these have ended.
    """
    processes: list[subprocess.Popen[bytes]] = []
    number: int = signal.SIGTERM
    try:
        for rank in range(count):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            own = {**environment, **{name: str(number) for name, number in numbers.items()}}
            processes.append(_start(rank, command, own, folder))
        return _wait(processes)
    except KeyboardInterrupt:
        number = signal.SIGINT
        raise
    except SystemExit as error:  # the answer to SIGTERM and SIGHUP
        number = int(error.code or 0) - SIGNALLED
        raise
    finally:
        _end(processes, number, grace)


def _start(rank: int, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own: Ctrl-C reaches it through this process alone, and only once."""
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with stderr_file(folder, rank).open("wb") as file:
        null = subprocess.DEVNULL
        return subprocess.Popen(command, env=environment, start_new_session=True, stdin=null, stdout=null, stderr=file)


def _wait(processes: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    while True:
        codes = [process.poll() for process in processes]
        if failed := {rank: code for rank, code in enumerate(codes) if code}:
            return failed
        if None not in codes:
            return {}
        time.sleep(_POLL)


def _end(processes: list[subprocess.Popen[bytes]], number: int, grace: float) -> None:
    """Send a signal to what still runs; kill what ignores it for long, or at once when a second signal arrives."""
    end = time.monotonic() + grace
    listen()  # a second one is this function's too
    try:
        for process in processes:
            process.send_signal(number)
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(_POLL)
    finally:
        for process in processes:
            process.kill()
            process.wait()
