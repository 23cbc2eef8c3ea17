"""Converts pickled weights (pytorch_model.bin) to safetensors, once; the only module that reads pickles.

torch's restricted unpickler builds tensors and containers and calls nothing else; whatever it refuses is refused here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architecture.hf_config import read_shape
from ...errors import CheckpointError, FetchError
from ...short_repr import first_line, short_text
from ...system.files import replace_file, sync_folder
from ..formats.safetensors import FolderCheckpoint
from ..formats.tensor_checks import check_tensors
from ..weights_digest import file_mark
from .staging import install, new_staging

if TYPE_CHECKING:
    from torch import Tensor

SAFE_UNPICKLER = (2, 10)  # the first torch whose restricted unpickler has no known hole
SHARD_BYTES = 2**29  # of a converted file; writing it takes twice that in memory
_INDEX = "model.safetensors.index.json"
_COPIED = ("*.json", "*.jinja", "tokenizer.model")
_AGAIN = "fetch the model again, or use a safetensors version of it"


def is_pickled(folder: Path) -> bool:
    """Return whether a folder has weights in pytorch_model.bin alone, in one file or in shards."""
    return folder.is_dir() and not any(folder.glob("*.safetensors")) and any(folder.glob("pytorch_model*.bin"))


def converted_folder(folder: Path, home: Path) -> Path:
    """Return where the conversion of a folder is, or would be; another name as soon as one of its files changes."""
    copied = sorted(file for pattern in _COPIED for file in folder.glob(pattern))
    files = [(file.name, file_mark(file)) for file in (*_weight_files(folder), *copied)]
    key = hashlib.sha256(repr([str(folder.resolve()), files]).encode()).hexdigest()[:16]
    return home / "models" / f"{_readable_name(folder)}-{key}"


def convert_pickled(folder: Path, home: Path, progress: Callable[[str, int, int], None]) -> Path:
    """Convert a folder's pickled weights to safetensors, a tensor at a time, and return the new folder.

    It is written beside its final place and renamed when complete, so that an interruption leaves nothing, and the
    next call begins anew. Raises CheckpointError for what is no dictionary of tensors, FetchError if it cannot be
    written, UnsupportedModel.
    """
    read_shape(folder / "config.json")  # an architecture that does not run is refused before the work
    final, files = converted_folder(folder, home), _weight_files(folder)
    staging = new_staging(final)
    try:
        _check_space(final.parent, files)
        ready = staging / "model"
        ready.mkdir()
        _write_shards(files, ready, progress)
        for pattern in _COPIED:
            for file in folder.glob(pattern):
                if file.name not in (_INDEX, "pytorch_model.bin.index.json"):
                    shutil.copyfile(file, ready / file.name)
        sync_folder(ready)
        check_tensors(FolderCheckpoint(ready))
        install(ready, final)
    except OSError as error:
        raise FetchError(f"cannot convert {folder}: {error}", "free some disk space") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _readable_name(folder: Path) -> str:
    """Return a folder's name, or the repository's for a snapshot in the hub's cache."""
    repository = folder.parent.parent.name
    return repository.removeprefix("models--") if repository.startswith("models--") else folder.resolve().name


def _weight_files(folder: Path) -> list[Path]:
    whole = folder / "pytorch_model.bin"
    return [whole] if whole.exists() else sorted(folder.glob("pytorch_model*.bin"))


def _check_space(folder: Path, files: list[Path]) -> None:
    needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(folder).free
    if needed > free:
        message = f"converting takes {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free"
        raise FetchError(message, "free some disk space, or set TRIFORCE_HOME to a folder on another disk")


def _write_shards(files: list[Path], target: Path, progress: Callable[[str, int, int], None]) -> None:
    """Write all tensors of `files` as safetensors files of about SHARD_BYTES, with their index."""
    total, done = sum(file.stat().st_size for file in files), 0
    shard: dict[str, Tensor] = {}
    size, index = 0, {}
    for name, tensor in _tensors(files):
        if name in index or name in shard:
            raise CheckpointError(f"{name} is in two of the files {', '.join(f.name for f in files)}", _AGAIN)
        shard[name] = tensor.clone()  # shared and strided tensors become ones of their own, as safetensors needs
        size += shard[name].nbytes
        done += shard[name].nbytes
        progress("converting to safetensors", min(done, total), total)
        if size >= SHARD_BYTES:
            index |= _write_shard(shard, target, len(set(index.values())))
            shard, size = {}, 0
    if shard:
        index |= _write_shard(shard, target, len(set(index.values())))
    if not index:
        raise CheckpointError(f"{files[0].parent} has no tensors in its weight files", _AGAIN)
    text = json.dumps({"metadata": {"total_size": done}, "weight_map": index}, indent=2)
    replace_file(target / _INDEX, f"{text}\n".encode())


def _write_shard(shard: dict[str, Tensor], target: Path, number: int) -> dict[str, str]:
    """Write one file; return its name for each of its tensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    name = f"model-{number + 1:05d}.safetensors"
    try:
        save_file(shard, target / name, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk
        raise OSError(str(error)) from error
    with open(target / name, "rb+") as file:
        os.fsync(file.fileno())
    # safetensors makes files for their owner alone; the cache may be shared, as far as the umask lets it.
    (target / name).chmod(0o666 & target.stat().st_mode)
    return dict.fromkeys(shard, name)


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield every name and contiguous tensor, backed by the file where its format can be mapped.

    Raises CheckpointError for anything but a flat dictionary of dense tensors, each no larger than its storage.
    """
    import torch

    for file in files:
        state = _load(file)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise CheckpointError(f"{file} is not a dictionary of tensors by name", _AGAIN)
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(f"{file}: {short_text(name)} is not a dense tensor", _AGAIN)
            tensor = tensor.detach()
            if tensor.nbytes > tensor.untyped_storage().nbytes():  # overlapping rows, which a copy would write out
                raise CheckpointError(f"{file}: {short_text(name)} is larger than its data", _AGAIN)
            yield name, tensor.contiguous()


def _load(file: Path) -> Any:
    """Return what torch's restricted unpickler reads. Raises CheckpointError for what it refuses."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_UNPICKLER:
        message = f"torch {torch.__version__} cannot be trusted with pickled weights (CVE-2026-24747)"
        raise CheckpointError(message, "pip install --upgrade torch, or use a safetensors version of the model")
    try:
        # Files of torch before 1.6 are no zip archives, and cannot be mapped.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except OSError:
        raise
    except Exception as error:  # corrupt archives and pickles raise many types
        message = f"{file} cannot be read as tensors alone, so it is not read: {short_text(first_line(error))}"
        raise CheckpointError(message, _AGAIN) from error
