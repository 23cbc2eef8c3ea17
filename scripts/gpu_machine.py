"""The machine that check_gpu.py measures: its device, link and rates, and plans for it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch
from gpu_bare import is_missing
from gpu_rows import GIB, Rows, Skipped

from offload.architecture.config import ModelShape
from offload.hardware.rates import Hardware
from offload.memory.link import Link, SimulatedLink
from offload.memory.tier_settings import TierSettings
from offload.planning.plan import Plan
from offload.planning.request import PlanRequest
from offload.settings.config import Placement, Speculation

CAP = 24 * GIB  # of device memory: that of the cards that most people have
SIMULATED = 2e9  # bytes a second, of the link in miniature
_SETTLED = 0.7  # of the free host memory that a check may use


class SmallPages(TierSettings):
    """Tiers with pages of any size, for sizes that are small."""

    page_unit = 1


class Machine:
    """The device under test; sizes fit a GPU, or are small on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.small = device == "cpu"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        if not self.small and not torch.cuda.is_bf16_supported(including_emulation=False):
            self.dtype = torch.float16
        self._cap = CAP if self.small else min(CAP, int(0.95 * torch.cuda.mem_get_info(self.device)[0]))
        self._hardware: Hardware | None = None

    @property
    def hardware(self) -> Hardware:
        """Return the measured rates. Raises Skipped before `rates`."""
        if self._hardware is None:
            raise Skipped("the machine's rates were not measured")
        return self._hardware

    def rates(self, rows: Rows) -> dict:
        """Measure what predictions need, as `triforce calibrate` does."""
        from offload.hardware.calibration import profile_of
        from offload.hardware.microbenchmarks import QUICK, BenchmarkSizes, measure
        from offload.hardware.rates import describe

        tiny = BenchmarkSizes(read=2**26, copy=2**22, host_rows=128, device_rows=128, seconds=0.02)
        measured = measure(self.device, sizes=tiny if self.small else replace(QUICK, device_rows=8192))
        found = describe(profile_of(measured), free_memory(), os.cpu_count())
        self._hardware = replace(found, gpus=1, link=SIMULATED if self.small else found.link)
        host = "host memory, host compute" if not self.small else "memory, compute"
        rows.add(host, f"{found.host_bandwidth / 1e9:.1f} GB/s, {found.host_flops / 1e9:.0f} GFLOPS")
        if not self.small:
            rows.add("device memory", f"{found.bandwidth / 1e9:.0f} GB/s")
            rows.add("device compute", f"{found.flops / 1e12:.1f} TFLOPS", str(self.dtype))
            rows.add("link", f"{found.link / 1e9:.1f} GB/s")
        if not self.small and is_missing("triton"):
            rows.add("warning", "slower", "there is no Triton: torch's operations are measured in place of its kernels")
            rows.slower += 1
        names = ("bandwidth", "flops", "link", "host_bandwidth", "host_flops")
        return {"rates": {name: getattr(self._hardware, name) for name in names}}

    def request(
        self,
        shape: ModelShape,
        tokens: int,
        settings: Speculation,
        offload: str = "stream",
        resident_layers: int | None = None,
        **rest: object,
    ) -> PlanRequest:
        """Return a plan request for this machine under the cap."""
        placement = Placement(
            offload, self._cap, resident_layers=resident_layers, link_gb_s=SIMULATED / 1e9 if self.small else None
        )
        return PlanRequest(
            "random", shape, tokens, self.hardware, placement, settings, itemsize=self.dtype.itemsize, **rest
        )

    @contextmanager
    def capped(self) -> Iterator[None]:
        """Within it, allocations beyond the cap fail, and peak memory is counted from now on."""
        if self.small:
            yield
            return
        self.clear()
        torch.cuda.reset_peak_memory_stats(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(self._cap / total, 1.0), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def clear(self) -> None:
        """Free what earlier parts have left."""
        gc.collect()
        if not self.small:
            torch.cuda.empty_cache()

    def compare_peak(self, rows: Rows, plan: Plan) -> None:
        """Compare the peak memory with the plan, in which the driver's is left out: torch does not count it."""
        planned = plan.device.total - plan.device.parts.get("CUDA", 0)
        if self.small:
            rows.add("peak memory", "not measured on a CPU", f"planned {planned / 2**20:.1f} MiB")
            return
        rows.compare_memory("peak memory", torch.cuda.max_memory_allocated(self.device), planned)

    def link(self) -> Link:
        """Return the link of the device, or a simulated one on the CPU."""
        if self.small:
            return SimulatedLink(SIMULATED)
        from offload.memory.cuda_link import CudaLink

        return CudaLink(self.device)

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        if not self.small:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def no_synchronization(self) -> Iterator[None]:
        """Within it, operations that wait for the device raise RuntimeError."""
        if self.small:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def seconds(self, run: Callable[[], object], times: int = 3, warm: int = 1) -> float:
        """Return the median seconds of `times` runs after `warm` warm-up runs."""
        taken = []
        for _ in range(warm + times):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return median(taken[warm:])

    def fits_host(self, size: float) -> bool:
        """Return whether a check may use so many bytes of host memory."""
        return size < _SETTLED * free_memory()


def free_memory() -> int:
    """Return the free bytes of host memory."""
    try:
        from offload.system.machine import free_host_memory
    except ImportError:  # without psutil
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free_host_memory()
