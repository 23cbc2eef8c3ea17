"""Schema of a hardware profile: GPUs, their link and the host, each number in the unit that its name ends with.

The numbers come from a data sheet (profiles.py) or a measurement (calibration.py). `build` makes any of these
dataclasses of a mapping; its errors name the key and the closest valid one. Imports no torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from ..errors import SettingsError
from ..settings.config import GROUPS, check_part
from ..short_repr import short_repr, short_text
from ..units import parse_size

T = TypeVar("T")
Key = tuple[str, ...]  # path of a value: ("gpu", "memory_gib")

_ASKED_FOR = ("stop", "coupled", "approximate", "kv")  # by a request alone: no hardware chooses them
OPTION_NAMES = [f.name for group in GROUPS for f in fields(group) if f.name != "constraint"]  # of all settings
_CHOSEN_BY_HARDWARE = [name for name in OPTION_NAMES if name not in _ASKED_FOR]
_SIZES = ("memory", "host_memory", "disk_limit", "cache_limit")  # options in bytes, which may be written as 22GiB
EXAMPLE = "`extends: rtx-3060` and `gpu: {memory_gib: 8}`"
_EXAMPLES = f"write lines such as {EXAMPLE}"
RATES = ("_gb_s", "_tflops", "_gflops")  # how the names of rates end
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "keys and values", type(None): "null"}


@cache  # evaluating annotations takes most of the time of reading a profile
def type_hints(kind: Hashable) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    return get_type_hints(kind)


class InvalidValue(SettingsError):
    """An invalid value at a `key`, which the message names."""

    def __init__(self, key: Key, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.key = key


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by its data sheet.

    `model` is the name that the driver reports; `memory_gib` in GiB; `bandwidth_gb_s` of the device memory in
    10^9 bytes a second; `bf16_tflops` dense, in 10^12 operations a second (float16 on a GPU without bf16 units).
    Raises SettingsError.
    """

    model: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float

    def __post_init__(self) -> None:
        _check(self, ("gpu",))


@dataclass(frozen=True, slots=True)
class Link:
    """The host-to-device connection of each GPU: its kind, and its rate in practice, from pinned memory.

    `bandwidth_gb_s` is in 10^9 bytes a second. Raises SettingsError.
    """

    kind: str
    bandwidth_gb_s: float

    def __post_init__(self) -> None:
        _check(self, ("link",))


@dataclass(frozen=True, slots=True)
class Host:
    """The host's memory in GiB, its read bandwidth in 10^9 bytes a second, its bf16 rate in 10^9 operations a second.

    `cores` are physical; `disk_gb_s` is the rate of large reads from disk. None: the machine's. Raises
    SettingsError.
    """

    memory_gib: float | None = None
    bandwidth_gb_s: float | None = None
    bf16_gflops: float | None = None
    cores: int | None = None
    disk_gb_s: float | None = None

    def __post_init__(self) -> None:
        _check(self, ("host",))


@dataclass(frozen=True, slots=True)
class Profile:
    """A hardware set-up. `gpu` and `link` describe each of its `gpus`; None if the data sheet is not known.

    `options` are defaults for command-line options, by their names in the configuration dataclasses.
    Raises SettingsError.
    """

    name: str
    description: str
    device: str  # cpu or cuda
    gpus: int = 0
    gpu: Gpu | None = None
    link: Link | None = None
    host: Host = field(default_factory=Host)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self, ())
        if self.device not in ("cpu", "cuda"):
            raise InvalidValue(("device",), f"device is {short_repr(self.device)}", "use cpu or cuda")
        if self.device == "cpu" and (self.gpus or self.gpu or self.link):
            hint = "use device: cuda, or remove gpus, gpu and link"
            raise InvalidValue(("device",), "device is cpu, but GPUs are described", hint)
        refuse_unknown(self.options, _CHOSEN_BY_HARDWARE, ("options",))
        parts = [(("options", name), {name: value}) for name, value in self.options.items()]
        for key, part in (*parts, (("options",), self.options)):  # each option, and their combinations
            try:
                check_part(part)
            except SettingsError as error:
                raise InvalidValue(key, f"{dotted(key)}: {error.message}", error.hint) from error

    def with_rates(self, gpu: Gpu | None = None, link: Link | None = None, host: Host | None = None) -> Profile:
        """Return this profile with the rates of another source, such as a measurement, where it has them.

        Names and sizes (memory, cores) are kept, as they may be chosen limits; only missing ones are filled in.
        """
        rated = _with_rates(self.host, host)
        return replace(self, gpu=_with_rates(self.gpu, gpu), link=_with_rates(self.link, link), host=rated)


def _with_rates(old: Any, new: Any) -> Any:
    if old is None or new is None:
        return old or new
    known = {f.name: getattr(new, f.name) for f in fields(new) if getattr(new, f.name) is not None}
    return replace(old, **{n: v for n, v in known.items() if n.endswith(RATES) or getattr(old, n) is None})


def build(kind: type[T], values: Any, source: str) -> T:
    """Build a dataclass whose fields are the keys of `values`. Raises SettingsError with the source and the key."""
    try:
        built: T = _built(kind, values, ())
        return built
    except InvalidValue as error:
        raise SettingsError(f"{source}: {error.message}", error.hint) from error


def _built(kind: Callable[..., Any], values: Any, key: Key) -> Any:
    if not isinstance(values, dict):
        what = dotted(key) or "the file"
        raise InvalidValue(key, f"{what} is {short_repr(values)}, not keys and values", _EXAMPLES)
    hints = type_hints(kind)
    refuse_unknown(values, [*hints, *(["extends"] if kind is Profile else [])], key)
    given = dict(values)
    for name, value in values.items():
        part: Any = next((hint for hint in (hints[name], *get_args(hints[name])) if is_dataclass(hint)), None)
        if part is not None and value is None:  # null means absent
            del given[name]
        elif part is not None:
            given[name] = _built(part, value, (*key, name))
        elif name == "options" and isinstance(value, dict):
            given[name] = {option: plain_option(own, ("options", option)) for option, own in value.items()}
    if missing := [dotted((*key, name)) for name in _required(kind) if name not in values]:
        raise InvalidValue(key, f"{', '.join(missing)} missing", _EXAMPLES)
    return kind(**given)


def _required(kind: Any) -> list[str]:
    """Return the names of a dataclass's fields that have no default."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def plain_option(value: Any, key: Key) -> Any:
    """Return an option's value as its setting has it: sizes in bytes, and a tree as text. Raises InvalidValue."""
    if key[-1] == "tree" and type(value) is int:  # a number of nodes, which the option takes as text
        return str(value)
    if key[-1] not in _SIZES or not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except SettingsError as error:
        raise InvalidValue(key, f"{dotted(key)}: {error.message}", error.hint) from error


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """Return the beginning of a hint, with the closest name; empty if none is close."""
    close = difflib.get_close_matches(wrong.lower(), list(right), 1)
    return f"did you mean {close[0]}? " if close else ""


def refuse_unknown(values: Iterable[Any], known: list[str], key: Key, listed: str = "") -> None:
    """Raise InvalidValue for the first of the names that is not known; `key` is the path of their mapping.

    `listed` says where the known ones are listed, if they are too many for a hint.
    """
    for name in values:
        if name not in known:
            hint = did_you_mean(str(name), known) + (listed or f"known here: {', '.join(known)}")
            raise InvalidValue((*key, name), f"unknown key {dotted((*key, name))}", hint)


def dotted(key: Key) -> str:
    """Return a key as messages name it: gpu.memory_gib."""
    return short_text(".".join(map(str, key)))


def _check(part: Any, key: Key) -> None:
    """Raise InvalidValue for a wrong type, and for a size or rate that is not positive."""
    dataclass_of: Any = type(part)
    for name, kind in type_hints(dataclass_of).items():
        value, where = getattr(part, name), (*key, name)
        _check_type(where, value, kind)
        if isinstance(value, float | int) and not (0 < value < math.inf or (kind is int and value == 0)):
            raise InvalidValue(where, f"{dotted(where)} is {short_repr(value)}", "use a positive number")


def _check_type(key: Key, value: Any, kind: Any) -> None:
    kinds = get_args(kind) if type(None) in get_args(kind) else (getattr(kind, "__origin__", kind),)
    accepted = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, accepted) or isinstance(value, bool):  # bool is a subclass of int
        wanted = " or ".join(_KINDS.get(own, own.__name__) for own in kinds)
        raise InvalidValue(key, f"{dotted(key)} is {short_repr(value)}, not {wanted}", "correct its value")
