"""Block files: the KV of one block of a prompt, with a header and a checksum that identify it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..files import replace_file
from .header import Header, UnusableBlock


def write_block(path: Path, header: Header, ids: Sequence[int], keys: Tensor, values: Tensor) -> int:
    """Save keys and values `[layers, kv_heads, tokens, head_dim]`, and return the file's bytes. Raises OSError."""
    tensors = {"ids": torch.tensor(ids), "keys": keys.contiguous(), "values": values.contiguous()}
    data = save(tensors, header.texts() | {"checksum": _checksum(tensors)})
    replace_file(path, data)
    return len(data)


def read_block(path: Path, key: str, ids: Sequence[int], part: str = "") -> tuple[Tensor, Tensor, Header]:
    """Return a file's keys and values, memory-mapped, and its header, after its checksum has been verified.

    Raises FileNotFoundError, and UnusableBlock for a file that is damaged or is not the block `key` of these tokens.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            raise UnusableBlock("it is not a regular file")
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            if (texts.get("key"), texts.get("part")) != (key, part):
                raise UnusableBlock("it is a different block")
            tensors = {name: file.get_tensor(name) for name in ("ids", "keys", "values")}
            header = Header.read(texts)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise UnusableBlock((str(error).splitlines() or [type(error).__name__])[0]) from error
    if _checksum(tensors) != texts.get("checksum"):
        raise UnusableBlock("its checksum is wrong")
    if tensors["ids"].tolist() != list(ids):
        raise UnusableBlock("it has different tokens")
    return tensors["keys"], tensors["values"], header


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
