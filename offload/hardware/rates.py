"""Hardware rates for plans: sizes in bytes, rates in bytes or operations a second, of each GPU and of the host."""

from dataclasses import dataclass, replace

from ..errors import SettingsError
from ..settings.config import Placement
from ..units import GIB
from .profiles import Profile

# The fraction of the data sheet's bandwidth that a kernel which only reads achieves: BabelStream on an A100 80GB, about
# 1.75 of 2.04 TB/s; STREAM on desktop CPUs is alike.
READ = 0.85
# Used where neither the profile nor a measurement has a number: two channels of DDR4-3200 (more where the links need it
# to reach their rates), and the peak of an AVX2 core at 3 GHz.
ASSUMED_HOST_GB_S = 51.2
ASSUMED_CORE_GFLOPS = 96.0
ASSUMED_CORES = 8
# Attention on the host of a GPU, by the native kernel, 10^9 operations a second and core beside reading: on a core with
# AVX-512, 22 rows over 32 KV heads came to 38 with reading; 8, 14 and 22 rows took .55, .77 and 1 of their time.
CORE_ATTENTION_GFLOPS = 54.0
# Bytes that one core reads a second, as data sheets count them: 18 GB/s at READ on a Zen 4 core (docs/benchmarks.md).
CORE_READ_GB_S = 21.0
ASSUMED_DISK_GB_S = 2.0  # large reads: NVMe drives reach 2 to 7, SATA ones 0.5
# Bytes of keys and values that a processor of a GPU reads a cycle at most, if each instruction of the compiled kernels
# takes one: for 9.0, of 32 query rows, by scripts/compile_kernels.py (docs/gpu.md). Others differ by a tenth.
BYTES_A_CYCLE = {"packed": 15.0, "q8": 8.0}
# Processors and boost clocks of data sheets, of the GPUs whose memories give more than 4 bytes a cycle and processor.
PROCESSORS = {"a100": (108, 1.41e9), "h100": (132, 1.83e9), "h200": (132, 1.83e9)}


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that computes. Rates are those of the data sheet; the link's is the one reached in practice.

    On a CPU the device is the host itself: `memory`, `bandwidth` and `flops` are the host's, and `link` is the rate of
    a copy within its memory, or of a simulated link. A size of None is unknown, and taken as enough.
    """

    name: str
    device: str  # cpu or cuda
    gpus: int  # that share the work; 1 on a CPU
    memory: int | None  # bytes, of each
    bandwidth: float  # bytes a second, of each
    flops: float  # operations a second in `dtype`, of each
    link: float  # bytes a second between the host and each
    host_memory: int | None
    host_bandwidth: float
    host_flops: float
    assumed: tuple[str, ...] = ()  # names of rates that were neither given nor measured
    dtype: str = "bf16"  # in which `flops` is counted: fp16 for a GPU without bf16
    disk: float | None = None  # bytes a second that are read from disk; None: not known
    disk_free: int | None = None  # bytes
    host_cores: int = ASSUMED_CORES
    threads: int = 0  # of a CPU, if its rates are those of fewer than its cores

    @property
    def shared(self) -> bool:
        """Return whether device and host are the same memory."""
        return self.device == "cpu"

    @property
    def host_attention(self) -> float:
        """Return the operations a second of attention on the host of a GPU: one core launches the GPU's kernels."""
        return max(self.host_cores - 1, 1) * CORE_ATTENTION_GFLOPS * 1e9

    @property
    def disk_rate(self) -> float:
        """Return the bytes a second that are read from disk, assumed if they were not measured."""
        return self.disk or ASSUMED_DISK_GB_S * 1e9


def describe(profile: Profile, host_memory: int | None = None, cores: int | None = None) -> Hardware:
    """Return the hardware of a profile; `host_memory` (bytes) and `cores` are the machine's, where it has none.

    Raises SettingsError for a GPU whose rates are not known.
    """
    host = profile.host
    memory = host_memory if host.memory_gib is None else int(host.memory_gib * GIB)
    rates = {"host bandwidth": host.bandwidth_gb_s, "host rate": host.bf16_gflops}
    gpu, link = profile.gpu, profile.link
    needed = profile.gpus * link.bandwidth_gb_s / READ if link else 0.0
    bandwidth = (host.bandwidth_gb_s or max(ASSUMED_HOST_GB_S, needed)) * 1e9
    count = host.cores or cores or ASSUMED_CORES
    flops = (host.bf16_gflops or count * ASSUMED_CORE_GFLOPS) * 1e9
    if profile.device == "cpu":
        gpus, sizes = 1, (memory, bandwidth, flops, bandwidth / 2)  # a copy reads and writes
    elif gpu is None or link is None:
        raise SettingsError(
            f"profile {profile.name} has no rates for its GPU and link, which a plan needs",
            "choose one that has with --gpu, or write one: a profile is a small YAML file",
        )
    else:
        gpus = profile.gpus
        sizes = (int(gpu.memory_gib * GIB), gpu.bandwidth_gb_s * 1e9, gpu.bf16_tflops * 1e12, link.bandwidth_gb_s * 1e9)
    assumed = tuple(name for name, rate in rates.items() if rate is None)
    dtype = "fp16" if profile.options.get("dtype") == "float16" else "bf16"
    disk = None if host.disk_gb_s is None else host.disk_gb_s * 1e9
    hardware = Hardware(profile.name, profile.device, gpus, *sizes, memory, bandwidth, flops, assumed, dtype, disk)
    return replace(hardware, host_cores=count)


def on_threads(hardware: Hardware, threads: int) -> Hardware:
    """Return a CPU with so many of its cores, 0 for all: few of them read less than the memory's channels give."""
    if not hardware.shared or not 0 < threads < hardware.host_cores:
        return hardware
    share = threads / hardware.host_cores
    bandwidth = min(hardware.bandwidth, max(share * hardware.bandwidth, threads * CORE_READ_GB_S * 1e9))
    flops, link = share * hardware.flops, min(hardware.link, bandwidth / 2)
    slower = replace(hardware, bandwidth=bandwidth, host_bandwidth=bandwidth, flops=flops, host_flops=flops, link=link)
    return replace(slower, host_cores=threads, threads=threads)


def with_link(hardware: Hardware, placement: Placement) -> Hardware:
    """Return the hardware with the simulated link, if there is one."""
    return hardware if placement.link_gb_s is None else replace(hardware, link=placement.link_gb_s * 1e9)


def read_share(hardware: Hardware, kv: str) -> float:
    """Return the share of a GPU's read rate at which attention reads keys and values in a format: 1 if memory binds."""
    if kv not in BYTES_A_CYCLE or hardware.name not in PROCESSORS:
        return 1.0
    processors, clock = PROCESSORS[hardware.name]
    return min(1.0, BYTES_A_CYCLE[kv] * processors * clock / (READ * hardware.bandwidth))


def unrated(device: str) -> Hardware:
    """Return a device, "cpu" or "cuda", whose rates and sizes are not known: enough to count bytes."""
    return Hardware(device, device, 1, None, 1.0, 1.0, 1.0, None, 1.0, 1.0)
