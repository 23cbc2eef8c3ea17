"""Digests of weight files. A file is hashed once, and again only if it may have changed.

Its size, modification and change time and inode tell: `cp -p`, `rsync -t` and archives give other weights the same size
and modification time, but not the same change time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..system.files import replace_file

if TYPE_CHECKING:
    from ..parallel.shard import Group

State = tuple[int, ...]

TICK = 2.0  # seconds; the coarsest change times of file systems
_PIECE = 1 << 24  # bytes that are hashed at a time


def weights_digest(files: Iterable[Path], notes: Path) -> str:
    """Return a digest of the files' contents; the file `notes` keeps those of single files. Raises OSError."""
    known = _read_notes(notes)
    names = {path: str(path.resolve()) for path in files}
    found = {name: _note(path, known.get(name)) for path, name in names.items()}
    kept = {name: note for name, (note, is_settled) in found.items() if is_settled}
    if any(known.get(name) != note for name, note in kept.items()):
        try:
            replace_file(notes, json.dumps(known | kept).encode())
        except OSError:
            pass  # the next run hashes the files again
    return hashlib.sha256("".join(note[-1] for note, _ in found.values()).encode()).hexdigest()


def _note(path: Path, known: list | None) -> tuple[list, bool]:
    """Return a file's state with the digest of its content, and whether the two stay true together.

    They do not if the file was written to while it was hashed, or just before: a change within one tick of the file
    system's clock leaves the change time as it is.
    """
    now, state = time.time(), file_state(path)
    if known and known[:-1] == [*state]:
        return known, True
    digest = _digest(path)
    return [*state, digest], file_state(path) == state and abs(now - state[2] / 1e9) > TICK


def _digest(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _read_notes(path: Path) -> dict[str, list]:
    if not path.is_file():  # reading a pipe or a device may never end
        return {}
    try:
        notes = json.loads(path.read_bytes())
        return {name: note for name, note in notes.items() if len(note) == 5 and isinstance(note[-1], str)}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}


def file_state(path: Path) -> State:
    """Return a file's size, modification and change time in ns, and inode. Raises OSError.

    The number of the device is not among them: on many file systems it is another one after each mount.
    """
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


_ENDS = 2**16  # bytes at both ends of a file
_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.safetensors", "pytorch_model*.bin")


def fingerprint(path: Path) -> str:
    """Return a digest of the names, sizes and ends of a model's files, by which ranks compare their models."""
    files = [path] if path.is_file() else sorted(file for pattern in _FILES for file in path.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if len(files) > 1 else ''} {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_ENDS))
            stream.seek(max(size - _ENDS, 0))
            digest.update(stream.read(_ENDS))
    return digest.hexdigest()[:16]


def check_same(group: Group, facts: Mapping[str, Any]) -> None:
    """Raise SettingsError on every rank if a rank's facts differ from rank 0's; values are compared by their repr."""
    gathered = group.collect({name: repr(value) for name, value in facts.items()})
    first = gathered[0]
    for rank, theirs in enumerate(gathered):
        names = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if names:
            shown = "; ".join(f"{name}: {first.get(name)} and {theirs.get(name)}" for name in names[:4])
            raise SettingsError(
                f"rank 0 and rank {rank} differ in {shown[:500]}", "give all nodes the same command, version and model"
            )
