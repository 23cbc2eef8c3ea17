"""This process as one rank of a group: its position, how it joins the group, and how it ends.

Only rank 0 has the user's streams. Torch is imported only to join.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import SettingsError

from ..output.terminal import Terminal
from ..signals import DONE, FAILED, SIGNALLED, listen

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel
    from offload.parallel import Group

    from ..options.settings import Settings

FOLDER = "TRIFORCE_RANK_FOLDER"  # in which ranks that `launch` has started meet, and report errors and exit code
LAUNCHER = "TRIFORCE_RANK_LAUNCHER"  # the process that has started this rank
_GRACE = 2.0  # seconds for the main thread to notice a lost rank by itself, and to clean up
_MAY_DIFFER = {"seed", "threads", "tensor_parallel", "join_timeout", "profile", "model", "draft"}
_MAY_DIFFER |= {"memory", "host_memory", "disk", "disk_limit", "dtype", "device"}


@dataclass(frozen=True, slots=True)
class WorldPosition:
    """A process among the ranks, as torchrun numbers them; `folder` is where ranks of one machine meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    folder: Path | None


def world_position(environ: Mapping[str, str]) -> WorldPosition | None:
    """Return the position that a launcher has given to this process; None if it runs alone. Raises SettingsError."""
    folder = environ.get(FOLDER)
    needed = {"RANK", "WORLD_SIZE"} if folder else {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    if not needed <= environ.keys() or environ["WORLD_SIZE"] == "1":
        return None
    names = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    try:
        rank, size, local_rank, local_size = (int(environ.get(name, usual)) for name, usual in names.items())
    except ValueError as error:
        raise SettingsError(f"{', '.join(names)} are not all numbers: {error}", "torchrun sets them") from None
    return WorldPosition(rank, size, local_rank, local_size, Path(folder) if folder else None)


def terminal_for(position: WorldPosition | None, color: str) -> Terminal:
    """Return the user's terminal for rank 0 and for a process that runs alone; the other ranks' output is discarded."""
    return Terminal(color=color) if position is None or position.rank == 0 else silent_terminal()


def silent_terminal() -> Terminal:
    """Return a terminal whose output is discarded, for as long as the process lives."""
    discarded = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return Terminal(stdout=discarded, stderr=discarded, color="never")


@dataclass(slots=True)
class _State:
    group: Any = None
    lost: bool = False
    abandoned: bool = False


_state = _State()


def join_group(settings: Settings) -> tuple[Group | None, Settings]:
    """Join the group that this process belongs to; return it, if any, and the settings with rank 0's seed.

    Where coupled is not given, that rank 0 has been given a seed chooses it for all.

    Raises RankMissing.
    """
    position = world_position(os.environ)
    if position is None:
        return None, settings
    for number in (signal.SIGINT, signal.SIGTERM):  # torch's rendezvous would not return to Python's handlers
        signal.signal(number, signal.SIG_DFL)
    if position.folder is not None:
        launcher = int(os.environ.get(LAUNCHER) or os.getppid())  # which may have ended by now
        threading.Thread(target=_follow_parent, args=(launcher,), daemon=True, name="parent").start()
    from offload.api.loader import resolve_device
    from offload.parallel.process_group import Ranks

    device = resolve_device(settings.engine.device, position.local_rank)
    local, mates = position.local_rank, position.local_world_size
    timeout, folder = settings.parallel.join_timeout, position.folder
    group = _state.group = Ranks(device, timeout, lost=_end_lost, local=local, mates=mates, folder=folder)
    if position.rank == 0:
        listen()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C for all
    seed, coupled = group.broadcast((settings.generation.seed, settings.coupled))
    generation = replace(settings.generation, seed=seed)
    return group, replace(settings, generation=generation, values={"coupled": coupled} | dict(settings.values))


def broadcast(group: Group | None, make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0 alone, and return its result, which must be JSON, on all ranks: tuples arrive as lists."""
    if group is None:
        return make()
    return group.broadcast(make() if group.rank == 0 else None)


def check_same_command(model: OpenModel, settings: Settings, compared: Mapping[str, Any]) -> None:
    """Raise SettingsError if the ranks were given different commands, versions or models."""
    if model.group.size == 1:
        return
    from importlib.metadata import version

    from offload.loading.weights_digest import check_same, fingerprint

    resolved = settings.described(settings.sampling(model.sampling))
    facts: dict[str, Any] = {name: version(name) for name in ("triforce", "torch", "transformers", "tokenizers")}
    facts |= {"device": model.device.type, "dtype": model.dtype, "native kernel": model.kernel != "off", **compared}
    facts |= {name: value for name, value in resolved.items() if name not in _MAY_DIFFER}
    checkpoints = {"model": model.checkpoint, "draft": model.draft}
    check_same(model.group, facts | {name: own and fingerprint(own.path) for name, own in checkpoints.items()})


def report(message: str, hint: str, code: int, lost: bool, terminal: Terminal) -> None:
    """Print an error of this process, and write it to the reports. `launch` prints that other ranks were lost."""
    position = world_position(os.environ)
    _state.lost = _state.lost or lost
    if position is not None and position.folder is not None:
        fields = {"rank": position.rank, "message": message, "hint": hint, "code": code, "lost": lost}
        (position.folder / f"error-{position.rank}.json").write_text(json.dumps(fields), "utf-8")
    if position is None or (position.rank == 0 and (position.folder is None or not lost)):
        terminal.error(message, hint)
    elif position.folder is None:
        Terminal().error(f"rank {position.rank}: {message}", hint)


def abandon() -> None:
    """Note that stdout was closed: this rank exits without waiting for the others."""
    _state.abandoned = True


def finish(code: int) -> None:
    """End this rank, whatever its threads do; return without a launcher."""
    position = world_position(os.environ)
    if position is None:
        return
    if position.folder is not None and position.rank == 0 and not _state.lost and code != SIGNALLED + signal.SIGTERM:
        (position.folder / "code").write_text(str(code), "utf-8")
    if _state.group is not None and code == DONE and not _state.abandoned:
        with suppress(Exception):
            _state.group.leave()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _end_lost(rank: int) -> None:
    """End this process from the watching thread: the main thread may wait for a GPU that waits for the lost rank."""
    time.sleep(_GRACE)
    report(f"rank {rank} has ended", "look at its output", FAILED, True, Terminal())
    finish(FAILED)


def _follow_parent(parent: int) -> None:
    """End this process when its parent, the launcher, was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(FAILED)
