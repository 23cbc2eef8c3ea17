"""Two processes share one model on one GPU: by gloo and the host, since NCCL refuses two ranks of one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu_machine import Machine
from gpu_models import RandomCheckpoint, llama, random_model
from gpu_parts import MOST_MARGIN, verdict
from gpu_rows import Rows
from gpu_text import GREEDY, generate
from torch import Tensor

from offload.engine import Engine
from offload.kernels.ops import TorchOperations
from offload.loading.weights import load_model
from offload.model.decoder import Model
from offload.parallel.process_group import Ranks
from offload.parallel.shard import split

ROOT, SIZE, SECONDS = Path(__file__).parents[1], 2, 100
IDS, NEW = list(range(1, 301)), 12
METHODS = (("ar", "chain"), ("retrieval", "chain"))


def shape() -> object:
    """Return the shape of the model that is shared."""
    return llama(2, 64, 4, 128, 512, 8192, 2)


class WholeCheckpoint(RandomCheckpoint):
    """A checkpoint whose weights may be read in part."""

    def __call__(self, name: str, part: object = None) -> torch.Tensor:
        whole = super().__call__(name)
        return whole if part is None else whole[part].contiguous()


class ByHost(Ranks):
    """Ranks of CPUs, to which tensors of the GPU that they share are copied: gloo does not gather those."""

    def sum(self, x: Tensor) -> Tensor:
        return super().sum(x.cpu()).to(x.device)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return super().gather(x.cpu(), widths).to(x.device)


def two_processes(machine: Machine, rows: Rows) -> dict:
    """Compare the answers of two ranks with those of one process; other ones fail."""
    with tempfile.TemporaryDirectory() as folder:
        found = _answers(machine.device.type, folder)
    model = random_model(shape(), machine.dtype, machine.device)
    engine = Engine(model, (), 256)
    for method, tree in METHODS:
        alone = generate(engine, IDS, NEW, method, tree, GREEDY, 0)
        first, second = (answers[f"{method}, {tree}"] for answers in found)
        if first != second:
            raise RuntimeError(f"{method}, {tree}: the ranks emit different tokens")
        told = verdict(model, IDS, alone, first, MOST_MARGIN[machine.dtype.itemsize])
        rows.add(f"two processes, {method}, {tree}", f"{len(first)} tokens", told)
    return {"ranks": SIZE}


def _answers(device: str, folder: str) -> list[dict[str, list[int]]]:
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    command = [sys.executable, __file__, device, folder]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        said = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise RuntimeError(f"a rank has failed: {errors.strip()[-200:]}")
    return [json.loads(answer.splitlines()[-1]) for answer, _ in said]


def _shared(machine: Machine, group: Ranks) -> Model:
    torch.manual_seed(0)
    checkpoint = WholeCheckpoint(shape(), machine.dtype, machine.device)
    share = split(checkpoint.shape, group.rank, group.size)
    where = checkpoint, machine.dtype, machine.device
    return load_model(*where, lambda done, total: None, TorchOperations(), group=group, share=share)


def main(device: str, folder: str) -> None:
    """Be one rank: print its answers as JSON."""
    machine = Machine(device)
    group = ByHost(torch.device("cpu"), timeout=60, folder=Path(folder))
    engine = Engine(_shared(machine, group), (), 256)
    found = {f"{method}, {tree}": generate(engine, IDS, NEW, method, tree, GREEDY, 0) for method, tree in METHODS}
    print(json.dumps(found), flush=True)
    group.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
