"""Hardware profiles: the data-sheet rates of a GPU set-up, and option defaults for it.

An error in a profile is reported with the file, the key and the closest valid one. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingsError
from ..short_repr import short_repr
from .driver import gpu_names
from .profile_file import is_path, read_extended
from .schema import Gpu, Host, Link, Profile, build

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # in other places before Python 3.11

__all__ = ["AUTO", "Gpu", "Host", "Link", "Profile", "available", "load", "matching", "same_gpu", "undescribed"]

AUTO = "auto"  # the profile for the hardware found
_MOST_SUGGESTED = 3
# The driver's names, simplified, that are no file's name, simplified; a test compares them with the files. Of cards of
# one name it is the one with more memory: a run uses no more than is free.
_OTHER_MODELS = {
    "4060ti": "rtx-4060-ti-16gb",
    "5060ti": "rtx-5060-ti-16gb",
    "a100sxm480gb": "a100",
    "h10080gbhbm3": "h100",
    "teslat4": "t4",
}


@cache  # a plan that does not fit looks at all profiles for one that would
def available() -> tuple[str, ...]:
    """Return the names of the profiles that come with the program."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml")))


def load(name_or_path: str | Path, gpus: Sequence[str] | None = None) -> Profile:
    """Return a profile by its name, by a common name of its hardware ("4090", "2x RTX 4090"), or from a YAML file.

    Only the files of that profile are read.

    Args:
        name_or_path: "auto" is the profile for the hardware found.
        gpus: names of this machine's GPUs, for "auto"; None asks the driver.

    Raises SettingsError for an unknown name, a file that cannot be read, and anything in it that makes no sense.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or is_path(text):
        return _read(Path(os.path.expanduser(text)), text)
    if text.lower() == AUTO:
        names = gpu_names() if gpus is None else gpus
        if (profile := matching(names)) is None:
            raise undescribed(names)
        return profile
    return _shipped(_resolved(text))


def matching(gpu_names: Sequence[str]) -> Profile | None:
    """Return the profile for the GPUs found, by their names as the driver (torch.cuda.get_device_name) reports them.

    No GPU is the cpu profile. Of the profiles for that model of GPU, the one with the most GPUs that are really there.
    None if no profile knows them: a variant (Laptop, 40GB) has other numbers than its namesake.
    """
    if not gpu_names:
        return _shipped("cpu")
    models = {_simplified(name) for name in gpu_names}
    name = _by_model().get(models.pop())
    if models or name is None:
        return None
    several = re.compile(rf"(\d+)x-{re.escape(name)}")
    counts = {int(match[1]): match[0] for match in map(several.fullmatch, available()) if match} | {1: name}
    return _shipped(counts[max(count for count in counts if count <= len(gpu_names))])


def same_gpu(first: str, second: str) -> bool:
    """Return whether two names mean the same model of GPU, whatever brand and punctuation they are written with."""
    return _simplified(first) == _simplified(second)


def undescribed(gpus: Sequence[str]) -> SettingsError:
    """Return the error for GPUs, by their names, that no profile describes."""
    hint = "`triforce profile --measure --save` measures it for all plans; or name a GPU like it, or a YAML file"
    return SettingsError(f"no profile describes the GPU found: {', '.join(dict.fromkeys(gpus))}", hint)


@cache
def _folder() -> Traversable:
    """Return offload/profiles of an installed wheel; profiles/ beside offload/ of a checkout or an editable install."""
    packaged = files("offload") / "profiles"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "profiles"


@cache
def _shipped(name: str) -> Profile:
    return _read(_folder() / f"{name}.yaml", f"{name}.yaml")


def _read(file: Path | Traversable, source: str) -> Profile:
    values = read_extended(file, source, lambda name: _folder() / f"{_resolved(name)}.yaml")
    profile = build(Profile, values, source)
    if profile.device == "cuda" and profile.gpus < 1:
        raise SettingsError(f"{source}: device is cuda, but gpus is 0", "say how many there are, such as gpus: 1")
    return profile


def _resolved(text: str) -> str:
    """Return the name of a profile that comes with the program; no file is opened. Raises SettingsError."""
    names = available()
    if text in names:
        return text
    simplified = _simplified(text)
    aliases = _by_model() | {_simplified(name): name for name in names}
    if simplified in aliases:
        return aliases[simplified]
    raise SettingsError(f"there is no profile {short_repr(text)}", _suggestion(text, names, aliases))


def _suggestion(text: str, names: Sequence[str], aliases: Mapping[str, str]) -> str:
    """Return a hint: the profiles whose names contain `text`, else the closest."""
    every = "`triforce profile` lists all; or give a path to a YAML file"
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    containing = [name for name in names if letters and letters in re.sub(r"[^a-z0-9]", "", name)]
    near = get_close_matches(_simplified(text), [*aliases, AUTO], _MOST_SUGGESTED)
    meant = containing or list(dict.fromkeys(aliases.get(alias, alias) for alias in near))
    return f"did you mean {', '.join(meant)}? {every}" if meant else every


def _by_model() -> dict[str, str]:
    """Return the name of the profile of one GPU by its model, simplified: mostly the file's name, simplified."""
    single = [name for name in available() if not re.match(r"\d+x-", name) and name != "cpu"]
    return {_simplified(name): name for name in single} | _OTHER_MODELS


def _simplified(name: str) -> str:
    """Return a name without brand and punctuation.

    'NVIDIA GeForce RTX 4090', 'rtx-4090' and '1x4090' all give '4090'; '2x RTX 4090' gives '2x4090', and
    'NVIDIA GeForce RTX 4090 Laptop GPU' gives '4090laptop'.
    """
    bare = re.sub(r"nvidia|geforce|rtx|gpu|[^a-z0-9]", "", name.lower())
    return re.sub(r"^1x", "", bare)
