"""This process as one rank of a group: where torch's launcher has put it, how it joins, and how it ends.

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

from ..exit_codes import DONE, FAILED, SIGNALLED
from ..output.terminal import Terminal
from ..signals import listen

if TYPE_CHECKING:
    from offload.loader import OpenModel
    from offload.parallel import Group

    from ..options.settings import Settings

REPORTS = "TRIFORCE_RANK_REPORTS"  # a folder: this rank was started by `launching`, which looks there for what happened
_GRACE = 2.0  # seconds for the main thread to notice a lost rank by itself, and to tidy up
_OWN = ("seed", "threads", "tensor_parallel", "join_timeout", "profile", "model", "draft", "memory", "host_memory")


@dataclass(frozen=True, slots=True)
class Seat:
    """Rank `rank` of `size`, number `local` of the `mates` on this machine."""

    rank: int
    size: int
    local: int
    mates: int
    reports: Path | None


def place(environ: Mapping[str, str]) -> Seat | None:
    """Where a launcher has put this process; None if it stands alone."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys() or environ["WORLD_SIZE"] == "1":
        return None
    reports = environ.get(REPORTS)
    names = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    try:
        numbers = [int(environ.get(name, usual)) for name, usual in names.items()]
    except ValueError as error:
        raise SettingsError(f"{', '.join(names)} are not all numbers: {error}", "torchrun sets them") from None
    return Seat(*numbers, Path(reports) if reports else None)


def terminal_of(here: Seat | None, color: str) -> Terminal:
    """The user's for rank 0 and for those who stand alone; the others speak to nobody but through `report`."""
    if here is None or here.rank == 0:
        return Terminal(color=color)
    # For as long as the process lives:
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return Terminal(stdout=nowhere, stderr=nowhere, color="never")


@dataclass(slots=True)
class _State:
    group: Any = None
    lost: bool = False
    abandoned: bool = False


_state = _State()


def joined(settings: Settings) -> tuple[Group | None, Settings]:
    """The group that this process belongs to, if any, and the settings with rank 0's seed. Raises RankMissing."""
    here = place(os.environ)
    if here is None:
        return None, settings
    for number in (signal.SIGINT, signal.SIGTERM):  # while it waits for the others nothing else would be heard
        signal.signal(number, signal.SIG_DFL)
    if here.reports is not None:
        threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True, name="parent").start()
    from offload.loader import resolve_device
    from offload.parallel.process_group import Ranks

    device = resolve_device(settings.engine.device, here.local)
    group = _state.group = Ranks(device, settings.parallel.join_timeout, lost=_lost, local=here.local, mates=here.mates)
    if here.rank == 0:
        listen()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what becomes of it
    seed = group.broadcast(settings.generation.seed)
    return group, replace(settings, generation=replace(settings.generation, seed=seed))


def told(group: Group | None, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, for all; the others need not be able to."""
    if group is None:
        return make()
    return group.broadcast(make() if group.rank == 0 else None)


def check_alike(opened: OpenModel, settings: Settings, request: Mapping[str, Any]) -> None:
    """Raises SettingsError if the ranks were given different commands, versions or models."""
    if opened.group.size == 1:
        return
    from importlib.metadata import version

    from offload.loading.same_model import check_same, fingerprint

    known = settings.described(settings.sampling(opened.sampling))
    facts = {name: version(name) for name in ("triforce", "torch", "transformers", "tokenizers")}
    facts |= {"device": opened.device.type, "dtype": opened.dtype, "native kernel": opened.kernel != "off", **request}
    facts |= {name: value for name, value in known.items() if name not in (*_OWN, "dtype", "device")}
    models = {"model": opened.checkpoint, "draft": opened.draft}
    check_same(opened.group, facts | {name: each and fingerprint(each) for name, each in models.items()})


def report(message: str, hint: str, code: int, lost: bool, terminal: Terminal) -> None:
    """An error of this process to the user. That others were lost is told by whoever started the ranks."""
    here = place(os.environ)
    _state.lost = _state.lost or lost
    if here is not None and here.reports is not None:
        fields = {"rank": here.rank, "message": message, "hint": hint, "code": code, "lost": lost}
        (here.reports / f"error-{here.rank}.json").write_text(json.dumps(fields), "utf-8")
    if here is None or (here.rank == 0 and (here.reports is None or not lost)):
        terminal.error(message, hint)
    elif here.reports is None:
        Terminal().error(f"rank {here.rank}: {message}", hint)


def abandon() -> None:
    """Nobody reads what comes out: this rank ends, though the others go on."""
    _state.abandoned = True


def finish(code: int) -> None:
    """End this rank, whatever its threads do; nothing happens where there is no group."""
    here = place(os.environ)
    if here is None:
        return
    if here.reports is not None and here.rank == 0 and not _state.lost and code != SIGNALLED + signal.SIGTERM:
        (here.reports / "code").write_text(str(code), "utf-8")
    if _state.group is not None and code == DONE and not _state.abandoned:
        with suppress(Exception):
            _state.group.leave()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _lost(rank: int) -> None:
    """By the thread that watches: the main thread may be waiting for a GPU that waits for the one that is gone."""
    time.sleep(_GRACE)
    report(f"rank {rank} has ended", "see what it said", FAILED, True, Terminal())
    finish(FAILED)


def _follow_parent(parent: int) -> None:
    """Nobody is left behind when whoever started the ranks is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(FAILED)
