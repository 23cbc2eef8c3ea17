"""Values between ranks, as JSON in tensors of bytes.

torch's own collectives of objects unpickle what they receive: whoever can write to a connection between ranks could run
code on them. JSON can only be wrong.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value, for JSON, on every rank. Raises TypeError for a value that JSON does not have."""
    is_first = dist.get_rank(group) == 0
    data = _bytes(value) if is_first else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor(len(data))
    dist.broadcast(length, 0, group=group)
    if not is_first:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return _value(data)


def collect(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, for JSON, in the order of ranks. Raises TypeError as `broadcast`."""
    data, size = _bytes(value), dist.get_world_size(group)
    lengths = torch.empty(size, dtype=torch.int64)
    dist.all_gather(list(lengths.unbind()), torch.tensor(len(data)), group=group)
    longest = int(lengths.max())
    found = torch.empty((size, longest), dtype=torch.uint8)
    padded = torch.nn.functional.pad(data, (0, longest - len(data)))
    dist.all_gather(list(found.unbind()), padded, group=group)
    return [_value(row[:length]) for row, length in zip(found, lengths.tolist(), strict=True)]


def _bytes(value: Any) -> Tensor:
    # A name of a file that is not UTF-8 has surrogates, which json.loads takes back.
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
