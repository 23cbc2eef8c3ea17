"""Hardware profiles: what a GPU set-up can do, and the option defaults that suit it. Data sheets, not measurements.

Every mistake in a profile is told with the file, the key and the nearest right one. Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml

from .config import GROUPS, check_part
from .errors import SettingsError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # in other places before Python 3.11

_OPTION_NAMES = [f.name for group in GROUPS for f in fields(group) if f.name != "stop"]
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "keys and values", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by its data sheet.

    `model` is the name that the driver reports; `memory_gib` in GiB; `bandwidth_gb_s` of the device memory in
    10^9 bytes a second; `bf16_tflops` dense, in 10^12 operations a second.
    """

    model: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float

    def __post_init__(self) -> None:
        _check(self, "gpu.")


@dataclass(frozen=True, slots=True)
class Link:
    """The host-to-device connection of each GPU: what it is, and its rate in practice in 10^9 bytes a second."""

    kind: str
    bandwidth_gb_s: float

    def __post_init__(self) -> None:
        _check(self, "link.")


@dataclass(frozen=True, slots=True)
class Host:
    """The host's memory in GiB, its bandwidth in 10^9 bytes a second, its bf16 rate in 10^9 operations a second.

    None means: found on the machine.
    """

    memory_gib: float | None = None
    bandwidth_gb_s: float | None = None
    bf16_gflops: float | None = None

    def __post_init__(self) -> None:
        _check(self, "host.")


@dataclass(frozen=True, slots=True)
class Profile:
    """A hardware set-up. `gpu` and `link` describe each of its `gpus`; None where the data sheet is not known.

    `options` are defaults for command-line options, by their names in the configuration dataclasses.
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
        _check(self, "")
        if self.device not in ("cpu", "cuda"):
            raise SettingsError(f"device is {self.device!r}", "use cpu or cuda")
        if self.device == "cpu" and (self.gpus or self.gpu or self.link):
            raise SettingsError(
                "device is cpu, but GPUs are described", "use device: cuda, or remove gpus, gpu and link"
            )
        _check_options(self.options)


def available() -> list[str]:
    """The names of the profiles that come with the program."""
    return sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml"))


def load(name_or_path: str | Path) -> Profile:
    """A profile by its name, by what one would call its hardware ("4090", "2x RTX 4090"), or from a YAML file.

    Raises SettingsError for an unknown name, a file that cannot be read, and anything in it that makes no sense.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text:
        try:
            return _read(Path(text).expanduser(), text)
        except RuntimeError as error:  # ~ of a user who does not exist
            raise SettingsError(f"cannot read {text}: {error}", "check the profile's path") from error
    names = available()
    if text in names:
        return _shipped(text)
    if wanted := _simplified(text):
        for profile in map(_shipped, names):
            if wanted in _called(profile):
                return profile
    hint = f"{_did_you_mean(text, names)}profiles: {', '.join(names)}; or give a path to a YAML file"
    raise SettingsError(f"there is no profile {text!r}", hint)


def matching(gpu_names: Sequence[str]) -> Profile | None:
    """The profile for the GPUs found, by their names as the driver (torch.cuda.get_device_name) reports them.

    No GPU is the cpu profile. Of the profiles for that model of GPU, the one with the most GPUs that are really there.
    None if no profile knows them: a variant (Laptop, 40GB) has other numbers than its namesake.
    """
    models = {_simplified(name) for name in gpu_names}
    fitting = [
        profile
        for profile in map(_shipped, available())
        if profile.gpus <= len(gpu_names) and models == ({_simplified(profile.gpu.model)} if profile.gpu else set())
    ]
    return max(fitting, key=lambda profile: profile.gpus, default=None)


def _folder() -> Traversable:
    """offload/profiles in an installed wheel; profiles/ beside offload/ in a checkout or an editable install."""
    packaged = files(__package__) / "profiles"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parent.parent / "profiles"


def _shipped(name: str) -> Profile:
    return _read(_folder() / f"{name}.yaml", f"{name}.yaml")


def _called(profile: Profile) -> set[str]:
    """What a profile answers to beside its name."""
    names = {_simplified(profile.name)}
    return names | {_simplified(profile.gpu.model)} if profile.gpu and profile.gpus == 1 else names


def _simplified(name: str) -> str:
    """'NVIDIA GeForce RTX 4090', 'rtx-4090' and '1x4090' are all '4090'; '2x RTX 4090' is '2x4090'."""
    bare = re.sub(r"nvidia|geforce|rtx|[^a-z0-9]", "", name.lower())
    return re.sub(r"^1x", "", bare)


def _read(file: Path | Traversable, source: str) -> Profile:
    """The profile in a YAML file; every error begins with `source`."""
    try:
        return _profile(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsError(f"cannot read {source}: {error.strerror or error}", "check the profile's path") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source} is not UTF-8 text", "a profile is a small YAML file") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise SettingsError(f"{where}: not valid YAML: {problem.splitlines()[0]}", "correct the file") from error
    except (ValueError, RecursionError) as error:  # yaml lets a date that is none, or 5,000 brackets, fall through
        raise SettingsError(f"{source}: not valid YAML: {error}", "correct the file") from error
    except SettingsError as error:
        raise SettingsError(f"{source}: {error.message}", error.hint) from error


def _profile(values: Any) -> Profile:
    values = dict(_mapping(values, "a profile"))
    for name, kind in (("gpu", Gpu), ("link", Link), ("host", Host)):
        part = values.pop(name, None)  # null is as good as absent
        if part is not None:
            values[name] = _build(kind, _mapping(part, name), f"{name}.")
    profile = _build(Profile, values, "")
    if profile.device == "cuda" and profile.gpus < 1:
        raise SettingsError("device is cuda, but gpus is 0", "say how many there are, such as gpus: 1")
    return profile


def _mapping(values: Any, what: str) -> dict:
    if not isinstance(values, dict):
        raise SettingsError(f"{what} is {values!r}, not keys and values", "see the profiles that come with the program")
    return values


def _build(kind: type, values: dict, prefix: str) -> Any:
    """A dataclass from a mapping; `prefix` says in messages where in the file it stands."""
    _refuse_unknown(values, [f.name for f in fields(kind)], prefix)
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [prefix + name for name in required if name not in values]:
        raise SettingsError(f"{', '.join(missing)} missing", "see the profiles that come with the program")
    return kind(**values)


def _refuse_unknown(values: dict, known: Sequence[str], prefix: str) -> None:
    for key in values:
        if key not in known:
            hint = f"{_did_you_mean(str(key), known)}known here: {', '.join(known)}"
            raise SettingsError(f"unknown key {prefix}{key}", hint)


def _did_you_mean(wrong: str, right: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong.lower(), right, 1)
    return f"did you mean {close[0]}? " if close else ""


def _check(part: Any, prefix: str) -> None:
    """Types as annotated, and numbers that can be a size or a rate."""
    for name, kind in get_type_hints(type(part)).items():
        value = getattr(part, name)
        _check_type(prefix + name, value, kind)
        if isinstance(value, float | int) and not (0 < value < math.inf or (kind is int and value == 0)):
            raise SettingsError(f"{prefix}{name} is {value}", "use a positive number")


def _check_options(options: dict) -> None:
    """As on the command line: the same names, types and limits. `stop` belongs to a request, not to hardware."""
    for group in GROUPS:
        hints = get_type_hints(group)
        for name in hints:
            if name in options and name != "stop":
                _check_type(f"options.{name}", options[name], hints[name])
    _refuse_unknown(options, _OPTION_NAMES, "options.")
    check_part(options)


def _check_type(name: str, value: Any, kind: Any) -> None:
    allowed = get_args(kind) or (kind,)
    accepted = (*allowed, int) if float in allowed else allowed
    if not isinstance(value, accepted) or isinstance(value, bool):  # to Python, True is the int 1
        wanted = " or ".join(_KINDS.get(each, each.__name__) for each in allowed)
        raise SettingsError(f"{name} is {value!r}, not {wanted}", "correct its value")
