"""What keys and values depend on, as names: the model's weights, how it computes, and the tokens up to a position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ..files import replace_file

if TYPE_CHECKING:
    from ..decoder import Model
    from ..kernels.native import Kernel
    from ..kv_cache.full import FullCache

TOKENS = 128  # of a block: what is common beyond the last whole block is run again
LEAST = 2000  # tokens of a prompt that is worth the disk
VERSION = 2  # of what a block's file holds, and of the arithmetic that has made it
_PIECE = 1 << 24
# Neither the config, of which RoPE is asked by its angles, nor what only says when to stop, changes keys and values.
_NO_PART = ("rope", "max_positions", "rope_divisors", "eos_ids", "context", "vocab")


def weights_digest(files: Sequence[Path], notes: Path) -> str:
    """A digest of the weight files' contents; `notes` remembers it as long as a file's size and time stay as they are.

    Raises OSError for a file that cannot be read.
    """
    known = _read_notes(notes)
    found = {}
    for path in files:
        state = path.stat()
        mark = [state.st_size, state.st_mtime_ns]
        name, old = str(path.resolve()), known.get(str(path.resolve()))
        found[name] = old if old and old[:2] == mark else [*mark, _digest(path)]
    if any(known.get(name) != value for name, value in found.items()):
        try:
            replace_file(notes, json.dumps(known | found).encode())
        except OSError:
            pass  # then it is computed again the next time
    return hashlib.sha256("".join(value[2] for value in found.values()).encode()).hexdigest()


def _read_notes(path: Path) -> dict:
    if not path.is_file():  # a pipe or a device would be read without end
        return {}
    try:
        notes = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_note = lambda value: isinstance(value, list) and len(value) == 3 and isinstance(value[2], str)  # noqa: E731
    return {name: value for name, value in notes.items() if is_note(value)} if isinstance(notes, dict) else {}


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def fingerprint(model: Model, full: FullCache, chunk: int, weights: str) -> str:
    """Of everything but the tokens: weights, shape, RoPE, dtype, what computes, and the layout of the files.

    What computes is in it because another kernel rounds otherwise, and for torch so do other pieces and chunks: a cache
    must not change what is said.
    """
    names = {field.name for field in fields(model.shape)}.difference(_NO_PART)
    shape = sorted((name, getattr(model.shape, name)) for name in names)
    kernel = model.operations.kernel
    how = ("torch", _version("torch"), _gpu_name(model)) if kernel is None else (kernel.level, _version("triforce"))
    cut = (_pieces(full, kernel), 0 if rounds_by_row(model) else chunk)
    where = (str(model.dtype), model.device.type, model.group.size)
    facts = repr((VERSION, TOKENS, weights, shape, where, how, cut))
    return hashlib.sha256(facts.encode() + full.rope.identity()).hexdigest()


def _pieces(full: FullCache, kernel: Kernel | None) -> int:
    """Tokens of the pieces in which the cache lies, as far as they change a bit: whole ones of the kernel's do not."""
    from ..kernels.native.library import PIECE

    span = full.store.span
    return 0 if kernel is not None and span % PIECE == 0 else span


def rounds_by_row(model: Model) -> bool:
    """Whether a token's numbers do not depend on how many are run with it: so with the native kernel, and no more than
    two ranks, whose sums know no order."""
    return model.operations.kernel is not None and model.group.size <= 2


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return ""


def _gpu_name(model: Model) -> str:
    """What computes, where it is a GPU."""
    import torch

    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""


def name_of_all(names: Sequence[str]) -> str:
    """One fingerprint for ranks that share a model."""
    return hashlib.sha256(" ".join(names).encode()).hexdigest()


def chain(fingerprint: str, ids: Sequence[int]) -> Iterator[str]:
    """The keys of the whole blocks of a prompt: each is a hash over all tokens up to the block's end."""
    key = fingerprint
    for start in range(0, len(ids) - TOKENS + 1, TOKENS):
        key = hashlib.sha256(f"{key} {list(ids[start : start + TOKENS])}".encode()).hexdigest()
        yield key
