"""Resolves a model's name to a local path: a folder, a .gguf file, the embedded model or a hub id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError, FetchError, ModelNotFound, TriforceError
from ..system import default_home
from .bundled import EMBEDDED, discard, fetch_embedded, installed_path

if TYPE_CHECKING:
    from .safetensors import Checkpoint

FetchProgress = Callable[[str, int, int], None]  # the step, units done, units in all
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Repositories may contain the weights twice, in subfolders or consolidated beside the shards: fetch them once.
_HUB_FILES = {
    "allow_patterns": ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"],
    "ignore_patterns": ["*/*", "consolidated*"],
}
_WAYS = "--model takes a folder, a .gguf file, a hub id such as Qwen/Qwen3-0.6B, or " + ", ".join(EMBEDDED)


def silent(what: str, done: int, total: int) -> None:
    """Ignore the progress of a fetch."""


def locate(name: str, home: Path | None = None, progress: FetchProgress = silent, refresh: bool = False) -> Path:
    """Return the local folder or .gguf file of a model, fetching it if necessary.

    Args:
        name: the value of --model.
        home: triforce's cache folder; None for the platform's. Hub models go to huggingface_hub's own cache.
        progress: called while the embedded model is fetched.
        refresh: query the hub even if the model is in its cache, and replace a damaged embedded model.

    Raises:
        ModelNotFound, FetchError.
    """
    path = check_name(name)
    if name in EMBEDDED:
        home = home or default_home()
        installed = installed_path(name, home)
        if installed and refresh and not _is_sound(installed):
            discard(installed)
            installed = None
        return installed or fetch_embedded(name, home, progress)
    return path or _from_hub(name, refresh)


def check_name(name: str) -> Path | None:
    """Check that a name can be located; return its local path, or None for the embedded model and hub ids.

    Raises ModelNotFound. Imports nothing heavy: a mistyped name is refused at once.
    """
    if not name:
        raise ModelNotFound("the model's name is empty", _WAYS)
    if name in EMBEDDED:
        return None
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # no such user, too long, no permission
        raise ModelNotFound(f"{name[:80]} is no usable path: {error}", _WAYS) from error
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        close = difflib.get_close_matches(name.lower(), EMBEDDED, 1)
        raise ModelNotFound(f"no model at {name}", f"did you mean {close[0]}? " + _WAYS if close else _WAYS)
    return None


def draft_error(error: TriforceError) -> TriforceError:
    """Return an error about a model as one about the draft model."""
    return type(error)(f"the draft model: {error.message}", error.hint.replace("--model", "--draft"))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the config and headers of a path from `locate`. Raises ModelNotFound, UnsupportedModel, CheckpointError."""
    if path.is_dir():
        from .safetensors import FolderCheckpoint

        return FolderCheckpoint(path)
    with path.open("rb") as file:
        if path.suffix == ".gguf" or file.read(4) == b"GGUF":
            from .gguf import GGUFCheckpoint  # imports torch

            return GGUFCheckpoint(path)
    raise ModelNotFound(f"{path} is neither a folder nor a .gguf file", _WAYS)


def _is_sound(path: Path) -> bool:
    """Return whether a folder's config, tensors and tokenizer can be read."""
    from .safetensors import FolderCheckpoint
    from .tensor_checks import check_tensors

    try:
        checkpoint = FolderCheckpoint(path)
        check_tensors(checkpoint)
        checkpoint.load_tokenizer()
    except TriforceError:
        return False
    return True


def _from_hub(name: str, refresh: bool) -> Path:
    """Return the snapshot folder of a hub model. Raises FetchError, ModelNotFound."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from .safetensors import FolderCheckpoint

    if not refresh:
        try:
            path = Path(snapshot_download(name, **_HUB_FILES, local_files_only=True))
            FolderCheckpoint(path)  # an interrupted download leaves an incomplete folder
            return path
        except (LocalEntryNotFoundError, ModelNotFound, CheckpointError):
            pass
    try:
        return Path(snapshot_download(name, **_HUB_FILES))
    except Exception as error:  # huggingface_hub and its HTTP client raise dozens of types
        raise _hub_error(name, error) from error


def _hub_error(name: str, error: Exception) -> Exception:
    """Return the error to raise for an exception of huggingface_hub."""
    from huggingface_hub import errors

    if type(error) in (OSError, PermissionError) and error.errno:  # local, not from the network
        return FetchError(f"cannot store {name}: {error}", "free some disk space, or set HF_HOME to a writable folder")
    if isinstance(error, errors.GatedRepoError):
        return FetchError(f"{name} is gated on the hub", "accept its licence there, then `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(f"there is no folder and no public hub model {name}", _WAYS)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return FetchError(
        f"no folder {name}, and the hub cannot be reached to fetch it: {reason}",
        "check the network, or copy the model here and give --model its folder",
    )
