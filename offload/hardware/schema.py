"""What a machine can do: its GPUs, their link and its host, each number in the unit that its name ends with.

The numbers come from a data sheet (profile.py) or were measured (measured.py). Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

from ..config import GROUPS, check_part
from ..errors import SettingsError
from ..short_repr import short_repr, short_text

Key = tuple[str, ...]  # where a value stands: ("gpu", "memory_gib")

UNITS = {"_gib": "GiB", "_gb_s": "GB/s", "_tflops": "TFLOPS", "_gflops": "GFLOPS", "_us": "us"}
_MOST = {  # more no hardware has: who writes it has taken another unit
    "gpus": 1024,
    "gpu.memory_gib": 1024,
    "gpu.bandwidth_gb_s": 100_000,
    "gpu.bf16_tflops": 100_000,
    "link.latency_us": 1_000_000,
    "host.memory_gib": 2**16,
    "host.bandwidth_gb_s": 100_000,
    "host.bf16_gflops": 10_000_000,
    "host.cores": 10_000,
}
_OPTION_NAMES = [f.name for group in GROUPS for f in fields(group) if f.name != "stop"]
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "keys and values", type(None): "null"}


class Misfit(SettingsError):
    """A value that makes no sense, and its `key`, by which a reader of files finds its line."""

    def __init__(self, key: Key, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.key = key


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by its data sheet.

    `model` is the name that the driver reports; `memory_gib` in GiB; `bandwidth_gb_s` of the device memory in
    10^9 bytes a second; `bf16_tflops` dense, in 10^12 operations a second. Raises SettingsError.
    """

    model: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float

    def __post_init__(self) -> None:
        _check(self, ("gpu",))


@dataclass(frozen=True, slots=True)
class Link:
    """The host-to-device connection of each GPU: what it is, and its rates in practice in 10^9 bytes a second.

    `bandwidth_gb_s` is from pinned memory to the device, `to_host_gb_s` back, `pageable_gb_s` from memory that could
    not be pinned; `latency_us` is what the smallest copy takes, in microseconds. None: not known. Raises SettingsError.
    """

    kind: str
    bandwidth_gb_s: float
    to_host_gb_s: float | None = None
    pageable_gb_s: float | None = None
    latency_us: float | None = None

    def __post_init__(self) -> None:
        _check(self, ("link",))


@dataclass(frozen=True, slots=True)
class Host:
    """The host's memory in GiB, its read bandwidth in 10^9 bytes a second, its bf16 rate in 10^9 operations a second.

    `cores` are physical. None means: found on the machine. Raises SettingsError.
    """

    memory_gib: float | None = None
    bandwidth_gb_s: float | None = None
    bf16_gflops: float | None = None
    cores: int | None = None

    def __post_init__(self) -> None:
        _check(self, ("host",))


@dataclass(frozen=True, slots=True)
class Profile:
    """A hardware set-up. `gpu` and `link` describe each of its `gpus`; None where the data sheet is not known.

    `options` are defaults for command-line options, by their names in the configuration dataclasses.
    Raises SettingsError for numbers that no hardware has.
    """

    name: str
    description: str
    device: str  # cpu or cuda
    gpus: int = 0
    gpu: Gpu | None = None
    link: Link | None = None
    host: Host = field(default_factory=Host)
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self, ())
        if self.device not in ("cpu", "cuda"):
            raise Misfit(("device",), f"device is {short_repr(self.device)}", "use cpu or cuda")
        if self.device == "cpu" and (self.gpus or self.gpu or self.link):
            hint = "use device: cuda, or remove gpus, gpu and link"
            raise Misfit(("device",), "device is cpu, but GPUs are described", hint)
        if self.gpu and self.link:
            _check_link(self.link, self.gpu)
        _check_options(self.options)

    def with_rates(self, gpu: Gpu | None = None, link: Link | None = None, host: Host | None = None) -> Profile:
        """This profile with the rates of another source, such as a measurement, where that knows them.

        Names and sizes (memory, cores) stay, for they may be limits that somebody chose; only gaps are filled.
        """
        parts = {"gpu": (self.gpu, gpu), "link": (self.link, link), "host": (self.host, host)}
        return replace(self, **{name: _with_rates(old, new) for name, (old, new) in parts.items()})


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """The beginning of a hint; empty where nothing is near."""
    close = difflib.get_close_matches(wrong.lower(), list(right), 1)
    return f"did you mean {close[0]}? " if close else ""


def refuse_unknown(values: Iterable[Any], known: list[str], key: Key) -> None:
    """Raises Misfit for the first of the names that is not among the known ones; `key` is where they stand."""
    for name in values:
        if name not in known:
            hint = f"{did_you_mean(str(name), known)}known here: {', '.join(known)}"
            raise Misfit((*key, name), f"unknown key {dotted((*key, name))}", hint)


def dotted(key: Key) -> str:
    """A key as messages name it: gpu.memory_gib."""
    return short_text(".".join(map(str, key)))


def _with_rates(old: Any, new: Any) -> Any:
    if old is None or new is None:
        return old or new
    known = {f.name: getattr(new, f.name) for f in fields(new) if getattr(new, f.name) is not None}
    rates = ("_gb_s", "_tflops", "_gflops", "_us")
    return replace(old, **{n: v for n, v in known.items() if n.endswith(rates) or getattr(old, n) is None})


def _check(part: Any, key: Key) -> None:
    """Types as annotated, and numbers that can be a size or a rate."""
    for name, kind in get_type_hints(type(part)).items():
        value, where = getattr(part, name), (*key, name)
        _check_type(where, value, kind)
        if not isinstance(value, float | int):
            continue
        if not (0 < value < math.inf or (kind is int and value == 0)):
            raise Misfit(where, f"{dotted(where)} is {short_repr(value)}", "use a positive number")
        most = _MOST.get(dotted(where), math.inf)
        if value > most:
            unit = next((f" {unit}" for suffix, unit in UNITS.items() if name.endswith(suffix)), "")
            raise Misfit(where, f"{dotted(where)} is {short_repr(value)}", f"no hardware has more than {most:,}{unit}")


def _check_type(key: Key, value: Any, kind: Any) -> None:
    allowed = get_args(kind) or (kind,)
    accepted = (*allowed, int) if float in allowed else allowed
    if not isinstance(value, accepted) or isinstance(value, bool):  # to Python, True is the int 1
        wanted = " or ".join(_KINDS.get(each, each.__name__) for each in allowed)
        raise Misfit(key, f"{dotted(key)} is {short_repr(value)}, not {wanted}", "correct its value")


def _check_link(link: Link, gpu: Gpu) -> None:
    """All that comes over the link is written to the device's memory."""
    for name in ("bandwidth_gb_s", "to_host_gb_s", "pageable_gb_s"):
        rate = getattr(link, name)
        if rate is not None and rate > gpu.bandwidth_gb_s:
            message = f"link.{name} is {rate}, more than the GPU's own memory has ({gpu.bandwidth_gb_s} GB/s)"
            raise Misfit(("link", name), message, "use GB/s; PCIe 4.0 x16 brings about 25, PCIe 5.0 x16 about 50")


def _check_options(options: dict) -> None:
    """As on the command line: the same names, types and limits. `stop` belongs to a request, not to hardware."""
    refuse_unknown(options, _OPTION_NAMES, ("options",))
    for group in GROUPS:
        for name, kind in get_type_hints(group).items():
            if name in options:
                _check_type(("options", name), options[name], kind)
    for name, value in options.items():
        _check_limits({name: value}, ("options", name))
    _check_limits(options, ("options",))  # and what does not go together


def _check_limits(options: dict, key: Key) -> None:
    try:
        check_part(options)
    except SettingsError as error:
        raise Misfit(key, f"{dotted(key)}: {error.message}", error.hint) from error
