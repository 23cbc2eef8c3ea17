"""Calibration: rates measured on this machine, saved in the user's folder, used instead of data sheets. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ..errors import SettingsError, TriforceError, UnusableMeasurement
from ..short_repr import short_repr
from ..system.files import replace_file
from .profile_file import read
from .profiles import same_gpu
from .schema import RATES, Gpu, Host, InvalidValue, Link, Profile, build

FILE = "measured.yaml"
_FORMER = ("busy", "packed")  # keys that earlier versions wrote, and below those of a link
_FORMER_LINK = ("to_host_gb_s", "pageable_gb_s", "latency_us")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured rates of a machine, in the units of Gpu, Link and Host; `gpu` and `link` describe each of its `gpus`.

    `date` is the day in UTC, as 2026-01-31; `machine` describes the hardware, without a host name; `torch` is the
    version that measured. None where something could not be measured. Raises SettingsError for impossible numbers.
    """

    date: str
    machine: str
    torch: str
    device: str  # cpu or cuda
    gpus: int = 0
    gpu: Gpu | None = None
    link: Link | None = None
    host: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        for name in ("date", "machine", "torch"):
            if not isinstance(getattr(self, name), str):
                raise InvalidValue((name,), f"{name} is {short_repr(getattr(self, name))}, not text", "measure again")
        profile_of(self)  # checks the numbers as those of a profile


def profile_of(measured: Measured) -> Profile:
    """Return a profile made of measurements alone, for hardware that no profile describes."""
    description = f"{measured.machine}, measured on {measured.date}"
    rates = measured.gpus, measured.gpu, measured.link, measured.host
    return Profile("measured", description, measured.device, *rates)


def applied(profile: Profile, measured: Measured | None, gpus: Sequence[str] = ()) -> Profile:
    """Return the profile with this machine's rates if it describes the same hardware: the same GPU model, or no GPU.

    Otherwise, and without a measurement, return the profile as it is. Names, sizes and options are kept. The host's
    free memory changes all the time, and is never taken from a measurement.

    `gpus` are the names of this machine's GPUs, for a profile that names none.
    """
    if measured is None or profile.device != measured.device:
        return profile
    host = replace(measured.host, memory_gib=None)
    if profile.device == "cpu":
        return profile.with_rates(host=host)
    names = gpus if profile.gpu is None else [profile.gpu.model]
    if not _is_among(measured.gpu, names):
        return profile
    return profile.with_rates(measured.gpu, measured.link, host)


def profile_of_found(gpus: Sequence[str], measured: Measured | None) -> Profile | None:
    """Return a profile of measurements alone for the GPUs with these names; None if others were measured."""
    if measured is None or not _is_among(measured.gpu, gpus):
        return None
    profile = profile_of(measured)
    count = sum(_is_among(measured.gpu, [name]) for name in gpus)
    return replace(profile, gpus=count, host=replace(profile.host, memory_gib=None))


def fastest(first: Measured, second: Measured) -> Measured:
    """Return the second measurement with the first's rates where those are higher, if both are of one machine.

    Other processes make a measurement slow, and none makes it fast.
    """
    if (first.device, first.gpus, first.host.cores) != (second.device, second.gpus, second.host.cores):
        return second
    parts = {name: _fastest(getattr(first, name), getattr(second, name)) for name in ("gpu", "link", "host")}
    return replace(second, **parts)


def _fastest(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return first or second
    rates = [field.name for field in fields(second) if field.name.endswith(RATES)]
    return replace(second, **{name: _most(getattr(first, name), getattr(second, name)) for name in rates})


def _most(*rates: float | None) -> float | None:
    return max((rate for rate in rates if rate is not None), default=None)


def default_folder() -> Path:
    """Return the platform's folder for triforce's settings (XDG on Linux)."""
    from platformdirs import user_config_path

    return user_config_path("triforce")


def save(measured: Measured, folder: Path) -> Path:
    """Write a measurement to `folder`, which is created if need be; return the file's path. Raises TriforceError."""
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = "# Written by triforce; delete it to go back to data sheets.\n" + yaml.safe_dump(
            asdict(measured), sort_keys=False, allow_unicode=True, width=120
        )
        replace_file(path, text.encode())
    except OSError as error:
        hint = "make the folder writable, or set TRIFORCE_CONFIG to another"
        raise TriforceError(f"cannot write {path}: {error.strerror or error}", hint) from error
    return path


def load(folder: Path) -> Measured | None:
    """Return what `save` wrote; None without a file.

    Raises UnusableMeasurement for a file that cannot be read or has impossible values, which deserves only a warning.
    """
    path = folder / FILE
    try:
        values = read(path, str(path)) if path.exists() else None
        if isinstance(values, dict):
            values = _without(values, _FORMER) | {"link": _without(values.get("link"), _FORMER_LINK)}
        return None if values is None else build(Measured, values, str(path))
    except (SettingsError, OSError) as error:
        message = error.message if isinstance(error, SettingsError) else f"cannot read {path}: {error.strerror}"
        raise UnusableMeasurement(f"{message}; data sheets are used instead", "measure again, or delete it") from error


def _without(values: Any, names: Sequence[str]) -> Any:
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if name not in names}


def _is_among(gpu: Gpu | None, names: Sequence[str]) -> bool:
    return gpu is not None and any(same_gpu(name, gpu.model) for name in names)
