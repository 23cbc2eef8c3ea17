"""Digests of weight files: the whole content identifies a model, and is hashed again only if a file may have changed.

A file may have changed if its size, its times, its inode or samples of its tensors have. Size and modification time
alone do not tell: `cp -p`, `rsync -t` and archives give other weights the same.

Ranks compare less of their files: they only have to find out that they do not run the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import SettingsError
from ..system.files import replace_file

if TYPE_CHECKING:
    from ..parallel.shard import Group

Extents = Sequence[tuple[int, int]]  # of the tensors in a file: first byte and number of bytes
State = tuple[int, ...]

TICK = 2.0  # seconds; the coarsest change times of file systems
_PIECE = 1 << 24  # bytes that are hashed at a time
_SAMPLE = 4096  # bytes: a page of the page cache
_MANY = 1024  # tensors in a file; of more, as experts have, each is sampled once and not three times


def weights_digest(files: Mapping[Path, Extents], notes: Path) -> str:
    """Return a digest of the weight files' contents, cached in the file `notes`.

    Args:
        files: where the tensors are in each file; a file without extents is sampled evenly.

    Raises OSError for a file that cannot be read.
    """
    known = _read_notes(notes)
    names = {path: str(path.resolve()) for path in files}
    found = {names[path]: _note(path, extents, known.get(names[path])) for path, extents in files.items()}
    kept = {name: note for name, (note, may_be_kept) in found.items() if may_be_kept}
    if any(known.get(name) != note for name, note in kept.items()):
        try:
            replace_file(notes, json.dumps(known | kept).encode())
        except OSError:
            pass  # the next run hashes the files again
    return hashlib.sha256("".join(note[-1] for note, _ in found.values()).encode()).hexdigest()


def _note(path: Path, extents: Extents, known: list | None) -> tuple[list, bool]:
    """Return a file's mark and the digest of its content, known or new, and whether they stay true together.

    They do not if the file was written to while it was hashed, or just before: a change within one tick of the file
    system's clock leaves the change time as it is.
    """
    now, mark = time.time(), file_mark(path, extents)
    if known and known[:-1] == mark:
        return known, True
    digest, state = _digest(path), file_state(path)
    return [*mark, digest], [*state] == mark[:-1] and abs(now - state[2] / 1e9) > TICK


def file_mark(path: Path, extents: Extents = ()) -> list:
    """Return what changes with a file: its `file_state` and a digest of samples. Raises OSError."""
    state = file_state(path)
    return [*state, _digest_of_samples(path, state[0], extents)]


def file_state(path: Path) -> State:
    """Return a file's size, modification and change time in ns, and inode. Raises OSError.

    The number of the device is not among them: on many file systems it is another one after each mount.
    """
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def are_unchanged(states: Mapping[Path, State]) -> bool:
    """Return whether all files are still as `file_state` has returned."""
    try:
        return all(file_state(path) == state for path, state in states.items())
    except OSError:
        return False


def _read_notes(path: Path) -> dict[str, list]:
    if not path.is_file():  # reading a pipe or a device may never end
        return {}
    try:
        notes = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_note = lambda value: isinstance(value, list) and len(value) == 6 and isinstance(value[-1], str)  # noqa: E731
    return {name: value for name, value in notes.items() if is_note(value)} if isinstance(notes, dict) else {}


def _digest(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _digest_of_samples(path: Path, size: int, extents: Extents) -> str:
    import xxhash

    digest, pieces = xxhash.xxh3_128(), list(_joined(_pieces(size, extents)))
    with path.open("rb", buffering=0) as file:
        _prefetch(file, pieces)
        for start, length in pieces:
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _pieces(size: int, extents: Extents) -> Iterator[tuple[int, int]]:
    """Yield the header, and the first, middle and last bytes of every tensor; evenly spread pieces without extents."""
    if not extents:
        step = max(size // _MANY, _SAMPLE)
        yield from ((start, _SAMPLE) for start in range(0, size, step))
        return
    yield 0, min(first for first, _ in extents)
    for first, length in extents:
        middle, last = first + length // 2 - _SAMPLE // 2, first + length - _SAMPLE
        for start in (first, middle, last) if len(extents) <= _MANY else (middle,):
            start = max(start, first)
            yield start, min(_SAMPLE, first + length - start)


def _joined(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield pieces in order, those that overlap or touch as one."""
    begin = end = 0
    for start, length in sorted(pieces):
        if start > end:
            yield begin, end - begin
            begin = start
        end = max(end, start + length)
    yield begin, end - begin


def _prefetch(file: BinaryIO, pieces: Sequence[tuple[int, int]]) -> None:
    """Let the system read all pieces at once, and not one after another; only those."""
    if not hasattr(os, "posix_fadvise"):
        return
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    for start, length in pieces:
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


_SAMPLE_OF_MODEL = 2**16  # bytes at the beginning, in the middle and at the end of a file
_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.safetensors")


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


def fingerprint(path: Path) -> str:
    """Return a digest of the names, sizes and samples of a model's files; reading whole files would take minutes."""
    files = [path] if path.is_file() else sorted(file for pattern in _FILES for file in path.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if len(files) > 1 else ''} {size}".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(size - _SAMPLE_OF_MODEL, 0)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_OF_MODEL))
    return digest.hexdigest()[:16]
