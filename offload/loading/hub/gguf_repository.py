"""One GGUF model of a hub repository that has several, with all of its parts."""

import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import ModelNotFound

_PART = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


def parts_of(files: Iterable[str], wanted: str) -> list[str]:
    """Return the files of the model that `wanted` names, in order: by its path, or its quantisation such as Q4_K_M."""
    models = sorted(file for file in files if file.lower().endswith(".gguf") and "mmproj" not in file.lower())
    quantised = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])", re.IGNORECASE)
    named = [file for file in models if file == wanted] or [file for file in models if quantised.search(file)]
    chosen = min(named, key=len, default="")  # other names of the same quantisation have a prefix: UD-Q4_K_M
    return [file for file in models if named and _PART.sub("", file) == _PART.sub("", chosen)]


def cached_gguf(repository: str, wanted: str) -> Path | None:
    """Return the first file of a model in the hub's cache; None if a part of it is missing there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, allow_patterns=["*.gguf"], local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    parts = parts_of((file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")), wanted)
    count = _PART.search(parts[0]) if parts else None
    return folder / parts[0] if parts and len(parts) == (int(count[1]) if count else 1) else None


def published_parts(repository: str, wanted: str) -> list[str]:
    """Return the files of a model in a repository. Raises ModelNotFound with those that there are."""
    from huggingface_hub import model_info

    files = [sibling.rfilename for sibling in model_info(repository).siblings or ()]
    if parts := parts_of(files, wanted):
        return parts
    names = [_PART.sub("", file) for file in files if file.lower().endswith(".gguf")]
    hint = f"it has {', '.join(dict.fromkeys(names))}" if names else "name another repository"
    raise ModelNotFound(f"{repository} has no GGUF file {wanted}", hint)
