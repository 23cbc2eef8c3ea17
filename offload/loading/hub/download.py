"""Finds and fetches a model's files: a folder, a .gguf file, the embedded model or a hub id becomes a local path."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ...architecture.checkpoint_json import read_json
from ...architecture.config import ModelShape
from ...architecture.config_checks import check_of_config
from ...architecture.dims import Dimensions, WeightBits
from ...architecture.head_shape import MTP, eagle3_shape, is_head, mtp_dimensions
from ...architecture.hf_config import read_shape
from ...architecture.known_models import KNOWN, PlanShape, known_name, published_bits
from ...architecture.weight_formats import rounded_bits
from ...errors import CheckpointError, FetchError, ModelNotFound, TriforceError, UnsupportedModel
from ...short_repr import first_line
from ...system.machine import default_home
from ..formats.checkpoint import Checkpoint
from ..formats.safetensors import FolderCheckpoint, weight_files
from ..formats.tensor_checks import average_bits, check_tensors
from .bundled import GENERATION, WEIGHTS, embedded_folder, fetch_embedded
from .gguf_repository import cached_gguf, published_parts
from .registry import EVERY_FORM, HUB_MODELS, ModelSource, did_you_mean, is_hub_id, resolve

FetchProgress = Callable[[str, int, int], None]  # the current step, units done, units in all
# The weights once: repositories may have them again in folders, or consolidated beside the shards.
_HUB_FILES = {
    "allow_patterns": ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"],
    "ignore_patterns": ["*/*", "consolidated*"],
}
_PICKLED_FILES = _HUB_FILES | {"allow_patterns": [*_HUB_FILES["allow_patterns"], "pytorch_model*.bin"]}


def silent(what: str, done: int, total: int) -> None:
    """Ignore progress: the FetchProgress of callers who show none."""


def locate(name: str, home: Path | None = None, progress: FetchProgress = silent, refresh: bool = False) -> Path:
    """Return the local folder or .gguf file of a model, fetching it if need be.

    Args:
        name: the value of --model.
        home: triforce's cache folder; None for the platform's. Hub models go to huggingface_hub's own cache.
        progress: called while the embedded model is fetched.
        refresh: what `pull` does beyond that: ask the hub even if the model is in its cache, and replace a damaged
            embedded model.

    Raises:
        ModelNotFound, FetchError, CheckpointError, UnsupportedModel.
    """
    source, home = resolve(name), home or default_home()
    if source.kind == "embedded":
        path = embedded_folder(source.target, home)
        if path.is_dir() and refresh and not _is_sound(path):
            shutil.rmtree(path)
        return path if path.is_dir() else fetch_embedded(source.target, home, progress)
    if source.kind == "path":
        return Path(source.target)
    if source.kind == "gguf":
        return (None if refresh else cached_gguf(source.target, source.file)) or _download_gguf(source)
    if source.known in HUB_MODELS and HUB_MODELS[source.known].is_for_plans:
        raise UnsupportedModel(f"{source.known} is for plans alone", f"triforce profile --model {source.known}")
    path = (None if refresh else _cached_snapshot(source.target)) or _download(source.target, _HUB_FILES)
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return path
    if not (path / "config.json").is_file():
        hint = f"of a repository of GGUF files, name one: --model {name}:Q4_K_M"
        raise ModelNotFound(f"{name} has no config.json and no weights in safetensors", hint)
    return _download(source.target, _PICKLED_FILES)


def is_here(name: str) -> bool:
    """Return whether a model's files are on this machine; the embedded one counts as such. Raises ModelNotFound."""
    source = resolve(name)
    if source.kind == "gguf":
        return cached_gguf(source.target, source.file) is not None
    return source.kind != "hub" or _cached_snapshot(source.target) is not None


def dimensions(name: str) -> PlanShape | ModelShape:
    """Return the dimensions of a model from as little of it as possible.

    Those of well-known models need no file. Of a folder or a hub model config.json is read, which is fetched if it is
    not in the hub's cache; of a GGUF file, the header. Raises as `locate`, UnsupportedModel.
    """
    source = resolve(name)
    path = _local_path(source)
    if path is not None and (path.is_file() or (path / WEIGHTS).is_file()):
        return open_checkpoint(path).shape
    if source.known is not None and (source.kind == "embedded" or not _is_cached(name)):
        return KNOWN[source.known]
    return (
        open_checkpoint(locate(name)).shape
        if source.kind == "gguf"
        else read_shape(_config_file(source, source.target))
    )


def _is_cached(name: str) -> bool:
    """Return whether a hub model's config.json is in the hub's cache, by the name that the user gave."""
    from huggingface_hub import try_to_load_from_cache

    return is_hub_id(name) and isinstance(try_to_load_from_cache(name, "config.json"), str)


def draft_dimensions(name: str, target: Dimensions) -> Dimensions:
    """Return the dimensions of a draft model, or of a head that drafts for `target`.

    Raises as `dimensions`, and SettingsError for a head of another target.
    """
    if name == MTP:
        return mtp_dimensions(target)
    source = resolve(name)
    if source.known is not None or source.kind in ("embedded", "gguf"):
        return dimensions(name)
    file = _config_file(source, source.target)
    config = read_json(file)
    return eagle3_shape(config, target, check_of_config(file)).dimensions if is_head(config) else dimensions(name)


def stored_bits(name: str) -> WeightBits | None:
    """Return the bits that the weights of a file or a folder take in memory beside 16-bit ones.

    Of a well-known model, those that it is published in. None for other names, and for weights that cannot be read: a
    plan needs only their dimensions.
    """
    source = resolve(name)
    path = _local_path(source)
    if path is None:
        level = re.search(r"q[4568]", source.file, re.IGNORECASE)  # a GGUF model that is not here has about these
        known = source.known if level else None
        return rounded_bits(KNOWN[known], level[0].lower()) if known and level else published_bits(source.known)
    try:
        checkpoint = open_checkpoint(path)
        sizes, quantized = checkpoint.sizes(), checkpoint.quantized_bits()
    except TriforceError:
        return None
    return average_bits(sizes, quantized, 2)


def describe_source(name: str) -> str:
    """Return where a well-known model comes from, with its licence; empty for one that the user has named exactly."""
    source = resolve(name)
    return f"{source.target}: {source.note}" if source.kind == "hub" and source.note else ""


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the config and headers of a path from `locate`. Raises ModelNotFound, UnsupportedModel, CheckpointError."""
    if path.is_dir() and not ((path / WEIGHTS).is_file() and not (path / "config.json").exists()):
        return FolderCheckpoint(path)
    from ..formats.gguf import GGUFCheckpoint  # it imports numpy

    if path.is_dir():
        return GGUFCheckpoint(path / WEIGHTS, path / GENERATION)
    if path.is_file():
        with path.open("rb") as file:
            if path.suffix == ".gguf" or file.read(4) == b"GGUF":
                return GGUFCheckpoint(path)
    raise ModelNotFound(f"{path} is neither a folder nor a .gguf file", EVERY_FORM)


def _is_sound(path: Path) -> bool:
    """Return whether a model's config, tensors and tokenizer can be read."""
    try:
        checkpoint = open_checkpoint(path)
        check_tensors(checkpoint)
        checkpoint.load_tokenizer()
    except TriforceError:
        return False
    return True


def _cached_snapshot(name: str) -> Path | None:
    """Return the hub's cached folder of a model; None if it is absent or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, **_HUB_FILES, local_files_only=True))
        try:  # an interrupted download leaves a folder without all of its files
            FolderCheckpoint(path)
        except UnsupportedModel:  # such as a drafter of one target
            weight_files(path)
    except (LocalEntryNotFoundError, ModelNotFound, CheckpointError):
        return None
    return path


def _download_gguf(source: ModelSource) -> Path:
    try:
        parts = published_parts(source.target, source.file)
    except ModelNotFound:
        raise
    except Exception as error:  # as in `_download`
        raise _hub_error(source.target, error) from error
    return _download(source.target, {"allow_patterns": parts}) / parts[0]


def _local_path(source: ModelSource) -> Path | None:
    """Return the path of a folder or file, or of a GGUF model in the hub's cache; None for others."""
    if source.kind == "gguf":
        return cached_gguf(source.target, source.file)
    return Path(source.target) if source.kind == "path" else None


def _download(name: str, files: dict[str, list[str]]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **files))
    except Exception as error:  # huggingface_hub and its HTTP client raise dozens of types
        raise _hub_error(name, error) from error


def _config_file(source: ModelSource, name: str) -> Path:
    """Return the config.json of a folder or a hub model, which is fetched if it is not in the hub's cache."""
    if source.kind == "path":
        return Path(source.target) / "config.json"
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found)
    file = _download(name, {"allow_patterns": ["config.json"]}) / "config.json"  # one file alone is tried for long
    if not file.is_file():  # other files were cached, which are enough for `_download` without a network
        hint = "check the network, or give --model a folder, or a .gguf file that you have fetched"
        raise FetchError(f"{name} has no config.json, or the hub cannot be reached to fetch it", hint)
    return file


def _hub_error(name: str, error: Exception) -> Exception:
    """Return the error to raise for an exception of huggingface_hub."""
    from huggingface_hub import errors

    is_local = type(error) in (OSError, PermissionError)  # and not from the network, whose errors are subclasses
    if is_local and isinstance(error, OSError) and error.errno:
        return FetchError(f"cannot store {name}: {error}", "free some disk space, or set HF_HOME to a writable folder")
    if isinstance(error, errors.GatedRepoError):
        hint = f"accept its licence at https://huggingface.co/{name}, then `hf auth login`"
        return FetchError(f"{name} is gated on the hub", hint)
    meant = "" if known_name(name) else did_you_mean(name)
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(f"there is no folder and no public hub model {name}", meant + EVERY_FORM)
    reason = first_line(error).removeprefix("Got: ")
    hint = f"{meant}check the network, or copy the model here and give --model its folder"
    return FetchError(f"no folder {name}, and the hub cannot be reached to fetch it: {reason}", hint)
