"""Starts the ranks of a group on this machine through torch's elastic launcher, and tells how they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from offload.errors import SettingsError

from ..exit_codes import FAILED, INTERRUPTED, SIGNALLED, WRONG_USE
from ..output.terminal import Terminal
from .rank import LAUNCHER, REPORTS, place

if TYPE_CHECKING:
    from ..options.settings import Settings

_SHOW_CURSOR = "\r\x1b[K\x1b[?25h"


def ranks_to_start(settings: Settings) -> int:
    """How many ranks this process is to start; 0 if it is one, or does everything itself.

    As many as were asked for, else as the profile has GPUs, if they are there. Raises SettingsError.
    """
    if place(os.environ) is not None:
        return 0
    asked, profile = settings.parallel.tensor_parallel, settings.profile
    on_cpu = settings.engine.device == "cpu" or (settings.engine.device == "auto" and profile.device == "cpu")
    if asked == 1 or (asked is None and (on_cpu or profile.gpus < 2)):
        return 0
    import torch

    count = asked or profile.gpus
    if settings.engine.device == "cpu" or not (there := torch.cuda.device_count()):
        if settings.engine.device == "cuda":
            return 0  # which says that there is none
        return count if asked else 0
    if there >= count:
        return count
    if asked is None:
        return 0
    raise SettingsError(
        f"{count} ranks need {count} GPUs, and torch sees {there} here",
        f"use --tensor-parallel {there}, --device cpu, or torchrun on several machines",
    )


def launch(count: int, settings: Settings, home: Path | None, terminal: Terminal) -> int:
    """Run this same command line in `count` processes; the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _fetch(settings, home, terminal)
    _check_heads(settings, home, count)
    logging.disable(logging.CRITICAL)  # the launcher's own; ranks speak for themselves
    with TemporaryDirectory(prefix="triforce-ranks-") as folder:
        _prepare(Path(folder), count)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="triforce",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(folder, dict.fromkeys(range(1, count), Std.ALL)),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "triforce_cli", *sys.argv[1:])
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _verdict(Path(folder), codes, terminal)
        except SignalException as error:
            code = INTERRUPTED if error.sigval == signal.SIGINT else SIGNALLED + error.sigval
            return _own_code(Path(folder)) or code
        return _own_code(Path(folder)) or 0


def _fetch(settings: Settings, home: Path | None, terminal: Terminal) -> None:
    """Once, and not by every rank at the same time. Raises TriforceError."""
    from offload.levels import has_draft_model
    from offload.loading.hub import locate

    from ..output.fetching import FetchBar

    with FetchBar(terminal, shown=terminal.shows_progress) as progress:
        locate(settings.engine.model, home, progress)
        if has_draft_model(settings.speculation):
            locate(settings.speculation.draft_model, home, progress)


def _check_heads(settings: Settings, home: Path | None, count: int) -> None:
    """Raise SettingsError for more ranks than the model has heads for: before so many processes are started."""
    from offload.architecture.known import shape_of
    from offload.loading.hub import locate, open_checkpoint
    from offload.parallel import split

    path = locate(settings.engine.model, home)
    has_config = (path / "config.json").is_file()
    split(shape_of(str(path))[1] if has_config else open_checkpoint(path).shape, 0, count)


def _prepare(folder: Path, count: int) -> None:
    """What the ranks find in their environment."""
    os.environ[REPORTS], os.environ[LAUNCHER] = str(folder), str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if Path("/sys/class/net/lo").exists():  # all are on this machine, whatever its name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _own_code(folder: Path) -> int | None:
    """Rank 0's, if it has come to an end of its own, about which it has told everything."""
    file = folder / "code"
    return int(file.read_text("utf-8")) if file.exists() else None


def _verdict(folder: Path, codes: dict[int, int], terminal: Terminal) -> int:
    """Why the ranks have failed, if rank 0 has not said it itself; the exit code."""
    if (code := _own_code(folder)) is not None:
        return code
    if terminal.shows_progress:
        terminal.draw(_SHOW_CURSOR)  # what was drawn there may have been left behind
    reports = [_read(file) for file in sorted(folder.glob("error-*.json"), key=lambda file: file.stat().st_mtime)]
    for told in (each for each in reports if not each["lost"]):
        who = "" if told["code"] == WRONG_USE else f"rank {told['rank']}: "
        terminal.error(who + told["message"], told["hint"])
        return told["code"]
    ours = (0, FAILED, SIGNALLED + signal.SIGTERM, -signal.SIGTERM)
    rank, code = next(((r, c) for r, c in codes.items() if c not in ours), next(iter(codes.items())))
    if code < 0:
        name = signal.Signals(-code).name
        terminal.error(f"rank {rank} was killed by {name}", "was it short of memory? what was written so far is right")
    else:
        terminal.error(f"rank {rank} has ended with exit code {code}{_last_words(folder, rank)}", "")
    return FAILED


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def _last_words(folder: Path, rank: int) -> str:
    lines = [line for file in folder.rglob(f"{rank}/stderr.log") for line in file.read_text("utf-8").splitlines()]
    return f": {lines[-1].strip()}" if lines else ""
