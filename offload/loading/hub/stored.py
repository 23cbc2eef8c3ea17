"""The models on this machine: the embedded one, and those of the hub's cache."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ModelNotFound
from .bundled import bytes_below


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk: its name for --model, its bytes, when it was last read (seconds since 1970), and its folder."""

    name: str
    size: int
    used: float
    folder: Path
    remove: Callable[[], Any]


def stored_models(home: Path) -> list[StoredModel]:
    """Return the models on this machine, the most recently used first; `home` is triforce's cache folder."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    found = []
    for folder in (home / "models").glob("[!.]*"):
        used = max((file.stat().st_atime for file in folder.rglob("*") if file.is_file()), default=0.0)
        name, remove = folder.name.rpartition("-")[0] or folder.name, partial(shutil.rmtree, folder)
        found.append(StoredModel(name, bytes_below(folder), used, folder, remove))
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return found
    for repo in cache.repos:
        if repo.repo_type == "model":
            commits = [revision.commit_hash for revision in repo.revisions]
            remove = partial(_remove_revisions, cache, commits)
            found.append(StoredModel(repo.repo_id, repo.size_on_disk, repo.last_accessed, repo.repo_path, remove))
    return sorted(found, key=lambda model: model.used, reverse=True)


def stored_model(name: str, home: Path) -> list[StoredModel]:
    """Return the models of a name, in any case: several versions of the embedded one. Raises ModelNotFound."""
    found = [model for model in stored_models(home) if model.name.lower() == name.lower()]
    if not found:
        raise ModelNotFound(f"there is no model {name} on this machine", "`triforce models` lists them")
    return found


def _remove_revisions(cache: Any, commits: list[str]) -> None:
    cache.delete_revisions(*commits).execute()
