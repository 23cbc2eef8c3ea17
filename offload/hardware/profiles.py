"""Hardware profiles: the data-sheet rates of a GPU set-up, and option defaults for it.

Those that come with the program are the YAML files of profiles/, named as their GPUs; users write others. An error in a
file is reported with the file, the key and the closest valid one. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..short_repr import short_repr
from .driver import gpu_names
from .profile_file import is_path, merged, read
from .schema import EXAMPLE, Gpu, Host, Link, Profile, build

__all__ = ["AUTO", "Gpu", "Host", "Link", "Profile", "available", "load", "matching", "same_gpu", "undescribed"]

AUTO = "auto"  # the profile for the hardware found
_OTHER_MODELS = {  # the driver's names, simplified, that are no file's name, simplified; a test compares them
    "4060ti": "rtx-4060-ti-16gb",
    "5060ti": "rtx-5060-ti-16gb",
    "a100sxm480gb": "a100",
    "h10080gbhbm3": "h100",
    "teslat4": "t4",
}
_MOST_SUGGESTED = 3
_MOST_EXTENDED = 8  # files that extend each other
_UNSUPPORTED = re.compile(r"apple|mac|\bm[1-5]\b|amd|radeon|\brx\b|\bmi ?\d|intel|\barc\b", re.IGNORECASE)


@cache
def available() -> tuple[str, ...]:
    """Return the names of the profiles that come with the program."""
    return tuple(sorted(file.stem for file in _folder().glob("*.yaml")))


@cache
def _folder() -> Path:
    """Return offload/profiles of an installed wheel, or profiles/ beside offload/ of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return folder if (folder := package / "profiles").is_dir() else package.parent / "profiles"


def load(name_or_path: str | Path, gpus: Sequence[str] | None = None) -> Profile:
    """Return a profile by its name, by a common name of its hardware ("4090", "2x RTX 4090"), or from a YAML file.

    Args:
        name_or_path: "auto" is the profile for the hardware found.
        gpus: names of this machine's GPUs, for "auto"; None asks the driver.

    Raises SettingsError for an unknown name, a file that cannot be read, and anything in it that makes no sense.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or is_path(text):
        return _of_file(Path(os.path.expanduser(text)), text)
    if text.lower() == AUTO:
        names = gpu_names() if gpus is None else gpus
        if (profile := matching(names)) is None:
            raise undescribed(names)
        return profile
    return _shipped(_resolved(text))


def matching(gpu_names: Sequence[str]) -> Profile | None:
    """Return the profile for the GPUs found, by their names as the driver (torch.cuda.get_device_name) reports them.

    No GPU is the cpu profile. None if no profile knows them: a variant (40GB) has other numbers than its namesake.
    """
    if not gpu_names:
        return _shipped("cpu")
    models = {_simplified(name) for name in gpu_names}
    name = _by_model().get(models.pop())
    if models or name is None:
        return None
    pair = f"2x-{name}"
    return _shipped(pair if len(gpu_names) > 1 and pair in available() else name)


def same_gpu(first: str, second: str) -> bool:
    """Return whether two names mean the same model of GPU, whatever brand and punctuation they are written with."""
    return _simplified(first) == _simplified(second)


def undescribed(gpus: Sequence[str]) -> SettingsError:
    """Return the error for GPUs, by their names, that no profile describes."""
    hint = "`triforce profile --measure --save` measures it for all plans; or name a GPU like it with --gpu"
    return SettingsError(f"no profile describes the GPU found: {', '.join(dict.fromkeys(gpus))}", hint)


@cache
def _shipped(name: str) -> Profile:
    return build(Profile, _extended(_folder() / f"{name}.yaml", name), name)


def _of_file(path: Path, source: str) -> Profile:
    profile = build(Profile, _extended(path, source), source)
    if profile.device == "cuda" and profile.gpus < 1:
        raise SettingsError(f"{source}: device is cuda, but gpus is 0", "say how many there are, such as gpus: 1")
    return profile


def _extended(path: Path, source: str, depth: int = 0) -> Any:
    """Return the values of a file merged over those of the profile or file that its `extends` names, and so on.

    A file is relative to the one that names it; `depth` files extend this one. Raises SettingsError.
    """
    values = read(path, source)
    if not isinstance(values, dict) or "extends" not in values:
        return values
    wanted = str(values.pop("extends"))  # YAML reads the name 4090 as a number
    values.setdefault("name", path.stem)  # not inherited
    if depth == _MOST_EXTENDED:
        raise SettingsError(f"{source}: the files extend each other in a cycle", "let one of them stand alone")
    try:
        base = path.parent / os.path.expanduser(wanted) if is_path(wanted) else _folder() / f"{_resolved(wanted)}.yaml"
    except SettingsError as error:
        raise SettingsError(f"{source} extends {wanted}: {error.message}", error.hint) from error
    return merged(_extended(base, str(base), depth + 1), values)


def _resolved(text: str) -> str:
    """Return the name of a profile that comes with the program. Raises SettingsError."""
    names = available()
    simplified = _simplified(text)
    aliases = _by_model() | {_simplified(name): name for name in names}
    if text in names or simplified in aliases:
        return text if text in names else aliases[simplified]
    hint = f"`triforce profile --compare` lists all; another GPU is a YAML file with lines such as {EXAMPLE}"
    if _UNSUPPORTED.search(text):
        hint = "only NVIDIA GPUs and CPUs are supported; --gpu cpu plans for this machine's CPU"
    else:
        letters = re.sub(r"[^a-z0-9]", "", text.lower())
        containing = [name for name in names if letters and letters in re.sub(r"[^a-z0-9]", "", name)]
        near = get_close_matches(simplified, [*aliases, AUTO], _MOST_SUGGESTED)
        meant = containing or list(dict.fromkeys(aliases.get(alias, alias) for alias in near))
        hint = f"did you mean {', '.join(meant)}? {hint}" if meant else hint
    raise SettingsError(f"there is no profile {short_repr(text)}", hint)


def _by_model() -> dict[str, str]:
    """Return the name of the profile of one GPU by its name, and by the driver's, both simplified."""
    single = [name for name in available() if name != "cpu" and not name.startswith("2x-")]
    return {_simplified(name): name for name in single} | _OTHER_MODELS


def _simplified(name: str) -> str:
    """Return a name without brand and punctuation.

    'NVIDIA GeForce RTX 4090', 'rtx-4090' and '1x4090' all give '4090'; '2x RTX 4090' gives '2x4090', and
    'NVIDIA GeForce RTX 3070 Laptop GPU' gives '3070laptop'.
    """
    bare = re.sub(r"nvidia|geforce|rtx|gtx|gpu|[^a-z0-9]", "", name.lower())
    bare = re.sub(r"(\d{4}(ti)?)(mobile|m)$", r"\1laptop", re.sub(r"^(laptop|notebook)(.+)", r"\2\1", bare))
    return re.sub(r"^1x", "", bare)
