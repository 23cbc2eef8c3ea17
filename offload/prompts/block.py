"""One block of a prompt as a file: some tokens' keys and values, and what tells that they are those wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..files import replace_file


class UnusableBlock(Exception):
    """A file that is damaged, or not the block that its name promises."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What stands in a block's header beside the tensors. `prefill_s`: seconds that computing it took."""

    key: str
    parent: str  # the key of the block before it, "" for the first
    model: str
    label: str  # of the prompt, for people
    created: float  # seconds since the epoch
    prefill_s: float


def write_block(path: Path, facts: Facts, ids: Sequence[int], keys: Tensor, values: Tensor) -> int:
    """Save keys and values `[layers, kv_heads, tokens, head_dim]`; returns the file's bytes. Raises OSError."""
    tensors = {"ids": torch.tensor(ids), "keys": keys.contiguous(), "values": values.contiguous()}
    header = {name: str(getattr(facts, name)) for name in Facts.__slots__} | {"checksum": _checksum(tensors)}
    data = save(tensors, header)
    replace_file(path, data)
    return len(data)


def read_block(path: Path, key: str, ids: Sequence[int]) -> tuple[Tensor, Tensor, Facts]:
    """Keys and values from a file, in memory that is mapped to it; only what was checked against its sum.

    Raises FileNotFoundError, and UnusableBlock for anything else that is wrong.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("key") != key:
                raise UnusableBlock("it belongs to something else")
            tensors = {name: file.get_tensor(name) for name in ("ids", "keys", "values")}
            facts = _facts(header)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise UnusableBlock((str(error).splitlines() or [type(error).__name__])[0]) from error
    if _checksum(tensors) != header.get("checksum"):
        raise UnusableBlock("its checksum is wrong")
    if tensors["ids"].tolist() != list(ids):
        raise UnusableBlock("it holds other tokens")
    return tensors["keys"], tensors["values"], facts


def read_facts(path: Path) -> Facts:
    """The header alone, without a tensor. Raises UnusableBlock, OSError."""
    try:
        with safe_open(path, framework="np") as file:
            return _facts(file.metadata() or {})
    except (SafetensorError, ValueError) as error:
        raise UnusableBlock(str(error)) from error


def _facts(header: dict[str, str]) -> Facts:
    try:
        texts = {name: header[name] for name in Facts.__slots__}
    except KeyError as error:
        raise UnusableBlock(f"its header lacks {error}") from None
    numbers = {name: float(texts[name]) for name in ("created", "prefill_s")}
    return Facts(**{**texts, **numbers})


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
