"""Hardware profiles: the data-sheet rates of a GPU set-up, and option defaults for it.

An error in a profile is reported with the file, the line, the key and the closest valid one. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingsError
from ..short_repr import short_repr
from .driver import gpu_names
from .profile_file import build, is_path, read_extended
from .schema import Gpu, Host, Link, Profile, did_you_mean

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # in other places before Python 3.11

__all__ = ["AUTO", "Gpu", "Host", "Link", "Profile", "available", "load", "matching", "same_gpu", "undescribed"]

AUTO = "auto"  # the profile for the hardware found


def available() -> list[str]:
    """Return the names of the profiles that come with the program."""
    return sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml"))


def load(name_or_path: str | Path, found: Sequence[str] | None = None) -> Profile:
    """Return a profile by its name, by a common name of its hardware ("4090", "2x RTX 4090"), or from a YAML file.

    Only the files of that profile are read, unless the name is that of a GPU model in one of them.

    Args:
        name_or_path: "auto" is the profile for the hardware found.
        found: names of this machine's GPUs, for "auto"; None asks the driver.

    Raises SettingsError for an unknown name, a file that cannot be read, and anything in it that makes no sense.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or is_path(text):
        return _read(Path(os.path.expanduser(text)), text)
    if text.lower() == AUTO:
        return _automatic(gpu_names() if found is None else found)
    return _shipped(_resolved(text))


def matching(gpu_names: Sequence[str]) -> Profile | None:
    """Return the profile for the GPUs found, by their names as the driver (torch.cuda.get_device_name) reports them.

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


def same_gpu(first: str, second: str) -> bool:
    """Return whether two names mean the same model of GPU, whatever brand and punctuation they are written with."""
    return _simplified(first) == _simplified(second)


def undescribed(found: Sequence[str]) -> SettingsError:
    """Return the error for GPUs, by their names, that no profile describes."""
    hint = "`triforce profile --measure --save` measures it for all plans; or name a GPU like it, or a YAML file"
    return SettingsError(f"no profile describes the GPU found: {', '.join(dict.fromkeys(found))}", hint)


def _automatic(found: Sequence[str]) -> Profile:
    profile = matching(found)
    if profile is None:
        raise undescribed(found)
    return profile


def _folder() -> Traversable:
    """Return offload/profiles of an installed wheel; profiles/ beside offload/ of a checkout or an editable install."""
    packaged = files("offload") / "profiles"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "profiles"


def _file(name: str) -> Traversable:
    return _folder() / f"{_resolved(name)}.yaml"


def _shipped(name: str) -> Profile:
    return _read(_folder() / f"{name}.yaml", f"{name}.yaml")


def _read(file: Path | Traversable, source: str) -> Profile:
    document = read_extended(file, source, _file)
    profile = build(Profile, document)
    if profile.device == "cuda" and profile.gpus < 1:
        hint = "say how many there are, such as gpus: 1"
        raise document.error(("gpus",), "device is cuda, but gpus is 0", hint)
    return profile


def _resolved(text: str) -> str:
    """Return the name of a profile that comes with the program. Raises SettingsError.

    File names are matched first, without opening the files; only then is each profile read for its model of GPU.
    """
    names = available()
    if text in names:
        return text
    simplified = _simplified(text)
    by_file = {_simplified(name): name for name in names}
    if simplified in by_file:
        return by_file[simplified]
    aliases = by_file | _gpu_models(names)
    if simplified in aliases:
        return aliases[simplified]
    raise SettingsError(f"there is no profile {short_repr(text)}", _suggestion(text, names, aliases))


def _suggestion(text: str, names: Sequence[str], aliases: Mapping[str, str]) -> str:
    """Return a hint: the profiles whose names contain `text`, else the closest one, and all of them."""
    every = f"profiles: {', '.join(names)}; or give a path to a YAML file"
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    containing = [name for name in names if letters and letters in re.sub(r"[^a-z0-9]", "", name)]
    if len(containing) > 1:
        return f"it may mean {', '.join(containing)}"
    if containing:
        return f"did you mean {containing[0]}? {every}"
    # No file can extend "auto", so it is not suggested to one.
    near = did_you_mean(_simplified(text), aliases if text == AUTO else [*aliases, AUTO])
    for alias, name in aliases.items():
        near = near.replace(f" {alias}?", f" {name}?")
    return near + every


def _gpu_models(names: Sequence[str]) -> dict[str, str]:
    """Return the profile's name by its simplified model of GPU, for profiles of one GPU."""
    found = {name: _shipped(name) for name in names}
    return {_simplified(p.gpu.model): name for name, p in found.items() if p.gpu and p.gpus == 1}


def _simplified(name: str) -> str:
    """Return a name without brand and punctuation.

    'NVIDIA GeForce RTX 4090', 'rtx-4090' and '1x4090' all give '4090'; '2x RTX 4090' gives '2x4090'.
    """
    bare = re.sub(r"nvidia|geforce|rtx|[^a-z0-9]", "", name.lower())
    return re.sub(r"^1x", "", bare)
