"""The processes of the ranks of this machine: started, waited for and ended together.

torch's own launcher is not used: its store listens on every network interface, and unpickles what is written to it.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..exit_codes import SIGNALLED
from ..signals import answered

_POLL = 0.05  # seconds
_GRACE = 30.0  # seconds for ranks to end after a signal


def stderr_file(folder: Path, rank: int) -> Path:
    """Return the file that has what a rank beside rank 0 has written to stderr."""
    return folder / f"rank-{rank}.stderr"


def run_processes(count: int, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> dict[int, int]:
    """Run a command in `count` processes until all have succeeded or one has failed; then end the others.

    Only rank 0 has this process' streams. Returns the exit codes of the ranks that failed first, by rank; negative ones
    are signals. Signals that end this process are sent on to the ranks, and raised when these have ended.
    """
    processes: list[subprocess.Popen[bytes]] = []
    number: int = signal.SIGTERM
    try:
        for rank in range(count):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            own = {**environment, **{name: str(each) for name, each in numbers.items()}}
            processes.append(_start(rank, command, own, folder))
        return _wait(processes)
    except KeyboardInterrupt:
        number = signal.SIGINT
        raise
    except SystemExit as error:  # the answer to SIGTERM and SIGHUP
        number = int(error.code or 0) - SIGNALLED
        raise
    finally:
        _end(processes, number)


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


def _end(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to what still runs; kill what ignores it for long, or at once when a second signal arrives."""
    end = time.monotonic() + _GRACE
    answered()  # a second one is this function's too
    try:
        for process in processes:
            process.send_signal(number)
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(_POLL)
    finally:
        for process in processes:
            process.kill()
            process.wait()
