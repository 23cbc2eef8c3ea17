"""Collects facts about this machine and this installation for `triforce doctor`, and measures two rates."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from ..architecture.families import FAMILIES
from ..architecture.families.family import WRAPPERS
from ..architecture.hf_config import shape_from_config
from ..architecture.known_models import draft_models
from ..errors import SettingsError
from ..hardware.microbenchmarks import link_rate, read_rate
from ..kernels.native import LEVELS, KernelUnavailable, find_kernel, use_threads
from ..loading.hub.bundled import bytes_below
from ..settings.config import EngineConfig
from ..system.machine import default_home, free_memory
from ..system.numa import Nodes, nodes
from .loader import resolve_device


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device. `link_gb_s` is 10^9 bytes a second from pinned host memory; None if it was not measured."""

    name: str
    memory_bytes: int
    free_bytes: int
    link_gb_s: float | None


@dataclass(frozen=True, slots=True)
class Device:
    """The device of the model: `used` is "cpu" or "cuda", or None with a `reason` if `asked` is not available."""

    asked: str
    used: str | None
    reason: str
    gpus: tuple[Gpu, ...]  # all GPUs, used or not


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU. `cores` are physical, None if the system does not report them. `threads` are torch's."""

    name: str
    cores: int | None
    logical_cores: int | None
    threads: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory. `read_gb_s` is 10^9 bytes a second for all threads together; None if it was not measured."""

    total_bytes: int
    free_bytes: int
    read_gb_s: float | None
    nodes: Nodes


@dataclass(frozen=True, slots=True)
class KernelState:
    """The native kernel: the `level` in use on a CPU, or None with a `reason`; `levels` are all available levels."""

    asked: str
    level: str | None
    reason: str
    hint: str
    levels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A fetched embedded model."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelCache:
    """triforce's cache folder and the embedded models in it; the folder may not exist yet."""

    folder: Path
    size_bytes: int
    models: tuple[CachedModel, ...]


@dataclass(frozen=True, slots=True)
class Families:
    """The families of models that load: those whose layers the native kernel runs, and those that need torch too."""

    native: tuple[str, ...]
    mixed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that matter for a bug report; `openmp` says whether torch was built with OpenMP."""

    triforce: str
    python: str
    torch: str
    transformers: str
    openmp: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `triforce doctor` shows."""

    device: Device
    processor: Processor
    memory: Memory
    kernel: KernelState
    cache: ModelCache
    families: Families
    draft_models: dict[str, str]  # well-known ones, by the name of the vocabulary that they draft for
    versions: Versions


def examine(config: EngineConfig, processor: str, home: Path | None = None, measure: bool = True) -> Report:
    """Collect the report. Fetches nothing; sets torch's number of threads to that of `config`.

    Args:
        processor: the CPU's name.
        home: triforce's cache folder; None for the platform's.
        measure: whether to measure the rates, which takes a second and up to a quarter of the free memory.
    """
    use_threads(config.threads)
    free = free_memory(torch.device("cpu"))
    cores = psutil.cpu_count(logical=False), psutil.cpu_count()
    return Report(
        device=_device(config.device, measure),
        processor=Processor(processor, *cores, torch.get_num_threads()),
        memory=Memory(psutil.virtual_memory().total, free, read_rate(free) if measure else None, nodes()),
        kernel=kernel_state(config.kernel),
        cache=model_cache(home or default_home()),
        families=families(),
        draft_models=draft_models(),
        versions=_versions(),
    )


def _device(asked: str, measure: bool) -> Device:
    gpus = tuple(_gpu(index, measure) for index in range(torch.cuda.device_count()))
    try:
        return Device(asked, resolve_device(asked).type, "", gpus)
    except SettingsError as error:
        return Device(asked, None, error.message, gpus)


def _gpu(index: int, measure: bool) -> Gpu:
    device = torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(torch.cuda.get_device_name(device), total, free, link_rate(device, free) if measure else None)


def kernel_state(asked: str) -> KernelState:
    """Return the state of the native kernel for a value of `EngineConfig.kernel`."""
    levels = []
    why_none = ""
    for level in LEVELS:
        try:
            levels.append(find_kernel(level).level)
        except KernelUnavailable as error:
            why_none = " ".join(str(error).split())  # compiler errors have many lines
    found = tuple(levels)
    if asked == "off":
        return KernelState(asked, None, "switched off", "", found)
    if not found:
        hint = "install a C compiler such as gcc, then install triforce again; until then torch serves, more slowly"
        return KernelState(asked, None, why_none, hint, found)
    if asked not in ("auto", *found):
        return KernelState(asked, None, f"this processor has no {asked}", "use --kernel auto", found)
    return KernelState(asked, find_kernel(asked).level, "", "", found)


def families() -> Families:
    """Return the families that load: those whose layers the native kernel runs, and those that need torch for some."""
    configs: dict[str, dict] = {name: {} for name in FAMILIES}
    configs |= {name: {"text_config": {"model_type": text}} for name, text in WRAPPERS.items()}
    native = {}
    for name, more in configs.items():
        shape = shape_from_config({"model_type": name, "eos_token_id": None, **more}, {})
        native[name] = shape.is_native and not shape.family_spec.has_layer_windows  # models usually have some
    return Families(*(tuple(name for name, is_native in native.items() if is_native is each) for each in (True, False)))


def model_cache(home: Path) -> ModelCache:
    """Return the contents of triforce's cache folder. Partial downloads, named with a dot, count in its size only."""
    try:
        folders = sorted(path for path in (home / "models").iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError:  # it does not exist yet, or may not be read
        folders = []
    return ModelCache(home, bytes_below(home), tuple(CachedModel(path.name, bytes_below(path)) for path in folders))


def _versions() -> Versions:
    openmp = torch.backends.openmp.is_available()
    return Versions(version("triforce"), platform.python_version(), torch.__version__, version("transformers"), openmp)
