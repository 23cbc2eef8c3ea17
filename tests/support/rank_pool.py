"""A pool of processes that are the ranks of a group, shared by many tests because starting them is slow."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from offload import EngineConfig, Speculation, open_model
from offload.engine import Engine
from offload.parallel.process_group import Ranks
from tests.support.engine import SMALL
from tests.support.forked import CONTEXT, start_server

CPU = torch.device("cpu")
_HELD: list[socket.socket] = []
_PATIENCE = 300.0  # seconds until ranks that do not answer are taken to wait for each other


def free_port() -> int:
    """Return a port that no other process gets: a socket here keeps it, beside which others with SO_REUSEADDR bind."""
    _HELD.append(holder := socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1]


class RankPool:
    """Processes that run functions as the ranks of a group."""

    def __init__(self, size: int) -> None:
        start_server()
        self._folder, self._pipes, self.processes = TemporaryDirectory(), [], []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs, rank, size, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(group, *args)` on every rank; return the results in order, None for a killed rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(pipe) for pipe in self._pipes]
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"rank {rank}: {error}"
        return [result for result, _ in answers]

    def _answer(self, pipe: Connection) -> tuple[Any, str | None]:
        if not pipe.poll(_PATIENCE):
            for process in self.processes:
                process.kill()
            return None, "no answer: do the ranks wait for each other?"
        try:
            return pipe.recv()
        except EOFError:  # killed
            return None, None

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(60)
            assert not process.is_alive(), "a rank did not end"
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size)})
    torch.set_num_threads(1)
    group = Ranks(CPU, timeout=_PATIENCE, folder=Path(folder))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((function(group, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def rank_engine(group, folder, draft, **more):
    config = EngineConfig(model=folder, dtype="float32", device="cpu", prefill_chunk=16, **more)
    opened = open_model(config, speculation=Speculation("naive", draft, **SMALL), group=group)
    loaded = opened.load()
    return Engine(loaded.model, (), 16, loaded.draft)
