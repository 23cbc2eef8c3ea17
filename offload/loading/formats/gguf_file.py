"""Reads the metadata and the tensors of GGUF files, also of files in parts, from their mapped bytes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import CheckpointError, UnsupportedModel
from ...short_repr import short_text
from ...system.platform import release_pages

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32  # bytes, of tensors, where the file names none
_NUMBERS = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "", "", "u8", "i8", "f8")  # numpy's names, by type of value
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_PART = re.compile(r"-\d{5}-of-(\d{5})(\.gguf)$", re.IGNORECASE)
_PARTS_KEY = "split.count"
# By the number of a type: its name, weights in a block, and bytes of a block; the gguf package knows further ones.
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 28: ("F64", 1, 8), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
_NEWER = {40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}  # that not every gguf package knows
BLOCK_BYTES = {name: size for name, _, size in _TYPES.values()}


class TensorInfo(NamedTuple):
    """A tensor of a file: its size, the number and name of its type, and the bytes of its rows.

    The bytes of a matrix are `[rows, bytes]` uint8, of several matrices `[..., rows, bytes]`.
    """

    size: tuple[int, ...]
    type: int
    kind: str
    data: np.ndarray


class GGUFFile:
    """The metadata of a file and the tensors of all its parts. Raises CheckpointError, UnsupportedModel."""

    def __init__(self, path: Path) -> None:
        self.paths = [path]
        self._parts = [_Part(path)]
        named = _PART.search(path.name)
        count = self._parts[0].value(_PARTS_KEY) or (int(named[1]) if named else 1)
        if count > 1:
            self.paths = _part_paths(path, count)
            self._parts = [_Part(each) for each in self.paths]

    def value(self, key: str) -> Any:
        """Return a value of the metadata: a number, a text, a list of texts, or an array; None if it is absent."""
        return self._parts[0].value(key)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of all parts by name."""
        return {name: tensor for part in self._parts for name, tensor in part.tensors().items()}

    def close(self) -> None:
        """Give back the memory of what was read, which counts as this process's: it can be read again."""
        for part in self._parts:
            part.close()


def _part_paths(path: Path, count: int) -> list[Path]:
    """Return the paths of all parts. Raises CheckpointError, with the name of one that is missing."""
    match = _PART.search(path.name)
    if match is None:
        raise CheckpointError(f"{path} is one of {count} parts, and its name does not say which", "rename it back")
    start = path.name[: match.start()]
    paths = [path.with_name(f"{start}-{number:05}-of-{count:05}{match[2]}") for number in range(1, count + 1)]
    for part in paths:
        if not part.is_file():
            raise CheckpointError(f"{path} is one of {count} parts, and {part.name} is missing", "fetch it too")
    return paths


class _Part:
    """One file, with a position from which the next value is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, len(_MAGIC)
        self._values: dict[str, tuple[int, int]] = {}  # by key: the type of a value and where it is
        self._lists: dict[str, list[str]] = {}  # that were read: they have as many texts as the vocabulary
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if self._map[: len(_MAGIC)] != _MAGIC:
                raise ValueError("it does not begin with GGUF")
            version = self._number("u4")
            if version not in _VERSIONS:
                raise ValueError(f"version {version} of the format is unknown")
            self._tensor_count, keys = self._number("u8"), self._number("u8")
            for _ in range(keys):
                key, kind = self._text(), self._number("u4")
                self._values[key] = kind, self._at
                self._skip(kind)
            self._tensors_at = self._at
        except (OSError, ValueError, IndexError, struct.error, OverflowError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> CheckpointError:
        reason = short_text(str(error)) or type(error).__name__
        return CheckpointError(f"{self._path} is corrupt, or not a GGUF file: {reason}", "fetch the model again")

    def _number(self, kind: str) -> Any:
        found = np.frombuffer(self._map, f"<{kind}", 1, self._at)[0].item()
        self._at += np.dtype(kind).itemsize
        return found

    def _text(self) -> str:
        (size,) = _LENGTH.unpack_from(self._map, self._at)
        self._at += _LENGTH.size + size
        if self._at > len(self._map):
            raise ValueError("it is truncated")
        return self._map[self._at - size : self._at].decode()

    def _skip(self, kind: int) -> None:
        if kind == _TEXT:
            self._at = self._walk(self._at, 1)
        elif kind == _ARRAY:
            inner, count = self._number("u4"), self._number("u8")
            if inner == _TEXT:
                self._at = self._walk(self._at, count)
            elif inner == _ARRAY:
                raise ValueError("it has an array of arrays")
            else:
                self._at += count * np.dtype(_NUMBERS[inner]).itemsize
        else:
            self._at += np.dtype(_NUMBERS[kind]).itemsize
        if self._at > len(self._map):
            raise ValueError("it is truncated")

    def _walk(self, at: int, count: int) -> int:
        """Return where an array of texts ends."""
        data, unpack = self._map, _LENGTH.unpack_from
        for _ in range(count):
            at += _LENGTH.size + unpack(data, at)[0]
        return at

    def value(self, key: str) -> Any:
        if key not in self._values:
            return None
        kind, self._at = self._values[key]
        try:
            if kind == _TEXT:
                return self._text()
            if kind != _ARRAY:
                return self._number(_NUMBERS[kind])
            inner, count = self._number("u4"), self._number("u8")
            if inner != _TEXT:
                return np.frombuffer(self._map, f"<{_NUMBERS[inner]}", count, self._at)
            if key not in self._lists:
                self._lists[key] = self._texts(count)
            return self._lists[key]
        except (ValueError, struct.error) as error:
            raise self._damaged(error) from error

    def _texts(self, count: int) -> list[str]:
        texts, at, data, unpack = [], self._at, self._map, _LENGTH.unpack_from
        for _ in range(count):
            begin = at + _LENGTH.size
            at = begin + unpack(data, at)[0]
            texts.append(data[begin:at].decode("utf-8", "surrogateescape"))
        return texts

    def tensors(self) -> dict[str, TensorInfo]:
        self._at = self._tensors_at
        found = {}
        try:
            for _ in range(self._tensor_count):
                name, axes = self._text(), self._number("u4")
                size = tuple(self._number("u8") for _ in range(axes))[::-1]  # the innermost axis comes first there
                found[name] = size, self._number("u4"), self._number("u8")
            end = self._at
            alignment = self.value("general.alignment") or _ALIGNMENT
            start = -(-end // alignment) * alignment
            return {name: self._tensor(name, size, kind, start + at) for name, (size, kind, at) in found.items()}
        except (ValueError, IndexError, struct.error, OverflowError) as error:
            raise self._damaged(error) from error

    def _tensor(self, name: str, size: tuple[int, ...], number: int, at: int) -> TensorInfo:
        kind, block, block_bytes = _TYPES[number] if number in _TYPES else _rare_type(name, number)
        row = size[-1] if size else 1
        if row % block:
            raise ValueError(f"{name} has rows of {row}, not whole blocks of {block}")
        stored = (*size[:-1], row // block * block_bytes)
        count = int(np.prod(stored, dtype=object))
        return TensorInfo(size, number, kind, np.frombuffer(self._map, np.uint8, count, at).reshape(stored))

    def close(self) -> None:
        release_pages(self._map)


def _rare_type(name: str, number: int) -> tuple[str, int, int]:
    """Return name, block and bytes of a type that only the gguf package knows. Raises UnsupportedModel."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        return (kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        raise unsupported_type(name, _NEWER.get(number, f"type {number}")) from None


def unsupported_type(name: str, kind: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} is stored as {kind}, which is not supported", "use another quantisation of the model"
    )
