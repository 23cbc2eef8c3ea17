"""Microbenchmarks of this machine: read, copy and matrix-product rates; the fastest of several runs counts."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter

import psutil
import torch

from ..kernels.linear import TorchLinear
from ..kernels.native.threads import usual_threads
from ..system.machine import free_memory, usable_cores
from ..system.platform import drop_cached
from ..system.scratch_file import ScratchFile
from ..units import GIB, counted
from .calibration import Measured
from .schema import Gpu, Host, Link

_MIN_READ = 2**26  # bytes: less would measure the caches
_RUNS = (3, 15)  # at least, at most
_DISK_READ = 2**22  # bytes at once


@dataclass(frozen=True, slots=True)
class BenchmarkSizes:
    """Sizes of the measurements: bytes to read, to copy and on disk, rows of the square matrices to multiply.

    `seconds` is the time for the runs of each measurement, beside the memory that it fills first.
    """

    read: int = 2**29  # many times the size of caches
    copy: int = 2**28
    disk: int = 2**27
    host_rows: int = 1024
    device_rows: int = 8192  # enough to saturate the largest GPU
    seconds: float = 0.4


QUICK = BenchmarkSizes(read=2**27, copy=2**26, host_rows=512, device_rows=4096, seconds=0.1)  # 0.3 s in all on a CPU


def measure(device: torch.device | str, processor: str = "", sizes: BenchmarkSizes = BenchmarkSizes()) -> Measured:
    """Measure the host and, if `device` is a CUDA device, that GPU and its link, in about ten seconds.

    Uses up to a quarter of the free memory on each side. What cannot be measured, for lack of memory, is None.
    `processor` is the CPU's name, for the description.
    """
    device = torch.device(device)
    with usual_threads():  # plans reckon from there for --threads
        host = Host(
            memory_gib=psutil.virtual_memory().total / GIB,
            bandwidth_gb_s=read_rate(free_memory(torch.device("cpu")), sizes),
            bf16_gflops=_matmul_rate(torch.device("cpu"), sizes.host_rows, sizes.seconds),
            cores=min(usable_cores(), torch.get_num_threads()),  # whose rates these are
        )
    date, version = datetime.now(timezone.utc).date().isoformat(), str(torch.__version__)
    cores = f"{processor or 'CPU'}, {counted(usable_cores(), 'core')}"
    if device.type != "cuda":
        return Measured(date, cores, version, "cpu", host=host)
    gpu, name = _gpu(device, sizes), torch.cuda.get_device_name(device)
    count = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())].count(name)
    rate = link_rate(device, torch.cuda.mem_get_info(device)[0], sizes) if gpu else None
    link = None if rate is None else Link("measured", rate)
    return Measured(date, f"{count}x {name}, {cores}", version, "cuda", count, gpu, link, host)


def read_rate(free: int, sizes: BenchmarkSizes = BenchmarkSizes()) -> float | None:
    """Return the GB/s at which torch's threads read host memory; None if `free` bytes are too few to measure."""
    size = min(sizes.read, free // 4)
    if size < _MIN_READ:
        return None
    return _rate(size, torch.ones(size // 4).sum, sizes.seconds)


def link_rate(device: torch.device, free: int, sizes: BenchmarkSizes = BenchmarkSizes()) -> float | None:
    """Return the GB/s from host memory, pinned if it can be, to a GPU with `free` bytes; None if others use it."""
    size = min(sizes.copy, free // 4, free_memory(torch.device("cpu")) // 4)
    try:
        remote = torch.empty(size, dtype=torch.uint8, device=device)
        host = torch.ones(size, dtype=torch.uint8)
    except RuntimeError:
        return None
    try:
        host = host.pin_memory()
    except RuntimeError:  # pages cannot be pinned, as in some containers
        pass
    return _rate(size, _synchronized(lambda: remote.copy_(host, non_blocking=True), device), sizes.seconds)


def disk_rate(folder: Path, sizes: BenchmarkSizes = BenchmarkSizes()) -> float:
    """Return the GB/s of large reads from a file in a folder, of which the page cache has dropped what it had.

    The file is gone afterwards. Raises SettingsError, OutOfDisk and OSError.
    """
    file = ScratchFile(folder, sizes.disk)
    with mmap.mmap(-1, _DISK_READ) as memory, memoryview(memory) as view:
        view[:] = os.urandom(_DISK_READ)  # some disks compress
        offsets = range(0, sizes.disk, _DISK_READ)
        for offset in offsets:
            file.write(view, offset)
        os.fsync(file.fileno())

        def read() -> None:
            drop_cached(file.fileno())
            for offset in offsets:
                file.read(view, offset)

        return _rate(sizes.disk, read, sizes.seconds)


def _gpu(device: torch.device, sizes: BenchmarkSizes) -> Gpu | None:
    free, total = torch.cuda.mem_get_info(device)
    size = min(4 * sizes.copy, free // 8)
    try:
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = _synchronized(lambda: target.copy_(source), device)  # it reads and writes every byte
        bandwidth = _rate(2 * size, copy, sizes.seconds)
        tflops = _matmul_rate(device, sizes.device_rows, sizes.seconds) / 1e3
    except RuntimeError:  # others use its memory
        return None
    return Gpu(torch.cuda.get_device_name(device), total / GIB, bandwidth, tflops)


def _matmul_rate(device: torch.device, rows: int, seconds: float) -> float:
    """Return the GFLOP/s of a product of two square bf16 matrices, as in prefill.

    It runs the program's own product: a CPU without bf16 instructions is many times faster through fp32.
    """
    weight, x = (torch.ones(rows, rows, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = TorchLinear(weight)
    return _rate(2 * rows**3, _synchronized(lambda: product(x), device), seconds)


def _synchronized(run: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Return a function that calls `run` and waits for the device."""

    def run_and_wait() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run_and_wait


def _rate(amount: int, run: Callable[[], object], seconds: float) -> float:
    """Return 10^9 units a second of the fastest of a few runs of `amount` units; the first one warms up."""
    run()
    taken: list[float] = []
    least, most = _RUNS
    while len(taken) < least or (len(taken) < most and sum(taken) < seconds):
        start = perf_counter()
        run()
        taken.append(perf_counter() - start)
    return amount / min(taken) / 1e9
