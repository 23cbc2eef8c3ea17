"""Block files: the KV of one block of a prompt, with a header and a checksum that identify it.

They are safetensors files, written and read here because its library copies the data. A block is read into memory of
its own in one go: what was verified is what is used, even if the file changes meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..system.files import replace_file
from .folder import Header, UnusableBlock
from .packing import unpack

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)  # of a header


class Buffer:
    """Memory that is used again for each file that is read into it, and for what is unpacked from it."""

    def __init__(self) -> None:
        self._read: np.ndarray = np.empty(0, np.uint8)
        self._unpacked: np.ndarray = np.empty(0, np.uint8)

    def read(self, path: Path) -> np.ndarray:
        """Return the bytes of a file, valid until the next call. Raises OSError."""
        with open(path, "rb", buffering=0) as file:
            if len(self._read) < (size := os.fstat(file.fileno()).st_size):
                self._read = np.empty(size, np.uint8)
            done = 0
            while done < size and (count := file.readinto(self._read.data[done:size])):
                done += count
        return self._read[:done]

    def unpacked(self, size: int) -> Tensor:
        """Return memory of `size` bytes for what the file's tensors are unpacked to."""
        if len(self._unpacked) < size:
            self._unpacked = np.empty(size, np.uint8)
        return torch.from_numpy(self._unpacked[:size])


def write_block(path: Path, header: Header, tensors: Mapping[str, Tensor]) -> int:
    """Save the tensors of a block, as `pack` returns them, and return the file's bytes. Raises OSError.

    The file is not synced: a power cut may leave a part of it, which the checksum tells from the whole.
    """
    texts, tensors = header.texts(), {name: tensor.contiguous() for name, tensor in tensors.items()}
    entries: dict[str, dict[str, Any]] = {"__metadata__": texts | {"checksum": _checksum(texts, tensors)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    replace_file(path, len(head).to_bytes(8, "little"), head, *map(_bytes, tensors.values()), sync=False)
    return 8 + len(head) + end


def read_block(path: Path, key: str, part: str = "", buffer: Buffer | None = None) -> tuple[Tensor, Header]:
    """Return a block's KV, which lies in the buffer, and its header, after its checksum has been verified.

    Raises FileNotFoundError, and UnusableBlock for a file that is damaged or is not the block `key`.
    """
    buffer = buffer or Buffer()
    try:
        texts, tensors = _parse(buffer.read(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableBlock(str(error)) from error
    if (texts.get("key"), texts.get("part")) != (key, part):
        raise UnusableBlock("it is a different block")
    if texts.pop("checksum", None) != _checksum(texts, tensors):
        raise UnusableBlock("its checksum is wrong")
    return unpack(tensors, buffer.unpacked), Header.read(texts)


def _parse(data: np.ndarray) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors, which are views, of a safetensors file. Raises UnusableBlock."""
    try:
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        entries = json.loads(data[8:start].tobytes())
        texts = entries.pop("__metadata__", {})
        return texts, {name: _tensor(data[start:], **entry) for name, entry in entries.items()}
    except _DAMAGE as error:
        raise UnusableBlock(f"its header is damaged: {type(error).__name__}") from error


def _tensor(data: np.ndarray, dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> Tensor:
    first, last = data_offsets
    return torch.from_numpy(data[first:last]).view(_DTYPES[dtype]).view(shape)


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def _checksum(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    import xxhash  # here: an engine without a prompt cache does without it, as the check of a bare GPU machine does

    digest = xxhash.xxh3_128(json.dumps(sorted(texts.items())).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()
