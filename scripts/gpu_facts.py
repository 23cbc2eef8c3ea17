"""What the machine is: versions, clocks, memory; how fast it pins memory, and copies by the size of a copy."""

from __future__ import annotations

import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version

import torch
from gpu_machine import Machine, free_memory
from gpu_rows import GIB, Rows

from offload.memory.host_memory import allocator

_QUERY = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,memory.free,driver_version"
_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "psutil", "gguf", "greenlet", "pytest")
_MIB = 2**20


def facts(machine: Machine, rows: Rows) -> dict:
    """Note versions, clocks, free memory and the compiler."""
    versions = {name: _version(name) for name in _PACKAGES}
    rows.add("packages", ", ".join(f"{name} {found}" for name, found in versions.items() if found))
    if absent := [name for name, found in versions.items() if not found]:
        rows.add("not installed", ", ".join(absent))
    compiler = shutil.which("gcc") or shutil.which("cc")
    rows.add("compiler", _first_line([compiler, "--version"]) if compiler else "none")
    rows.add("host memory", f"{free_memory() / GIB:.1f} GiB free", f"{torch.get_num_threads()} threads")
    gpu = "" if machine.small else _first_line(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"])
    rows.add("GPU", gpu or "not asked", _QUERY)
    return {"versions": versions, "gpu": gpu}


def pinning(machine: Machine, rows: Rows) -> dict:
    """Pin 1 to 64 GiB, one size after the other, as far as the host has memory; fails if even the first is refused."""
    allocate, unit, found = allocator(machine.device), _MIB if machine.small else GIB, {}
    for size in (1, 2, 4, 8, 16, 32, 64):
        if not machine.fits_host(size * unit):
            rows.add(f"{size} GiB", "not tried", "the host has too little memory")
            break
        start = time.perf_counter()
        memory = allocate((size * unit,), torch.uint8)
        found[size] = time.perf_counter() - start
        is_pinned = machine.small or memory.is_pinned()
        rows.add(f"{size} GiB", f"{found[size]:.2f} s", "" if is_pinned else "refused: pageable")
        del memory
        if not is_pinned:
            if size == 1:
                raise RuntimeError("not even 1 GiB of host memory could be pinned")
            break
    return {"seconds": found}


def link_sizes(machine: Machine, rows: Rows) -> dict:
    """Copy 2 to 64 MiB at once, both ways: how large a copy must be for the link's full rate."""
    link, total = machine.link(), (4 if machine.small else 512) * _MIB
    host = allocator(machine.device)((total,), torch.uint8)
    there = torch.empty(total, dtype=torch.uint8, device=machine.device)
    host.fill_(1)
    found = {}
    for size in (2, 4, 8, 16, 32, 64):
        piece = min(size * _MIB // (32 if machine.small else 1), total)
        for way, pair in {"to device": (there, host), "to host": (host, there)}.items():
            pieces = list(zip(*(x.split(piece) for x in pair), strict=True))

            def copy(pieces: list = pieces) -> None:
                tickets = [link.copy([each]) for each in pieces]
                link.finish(tickets[-1])

            rate = found[f"{size} MiB {way}"] = total / machine.seconds(copy)
            rows.add(f"{size} MiB, {way}", f"{rate / 1e9:.1f} GB/s", "simulated" if machine.small else "")
    return {"bytes_per_s": found}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip().splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return ""
