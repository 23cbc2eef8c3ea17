"""What the target computes over the texts, in shards on disk, so that its passes are run once and not in every epoch.

A shard is one file of blocks of `length` tokens, which exists as a whole or not at all. Of each token it has the id,
the rows that enter the tapped layers, the row before the final norm, the log-sum-exp of the logits, and the likeliest
token behind it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..caches.protocol import KVCache
from ..kernels.native.threads import torch_on_one_thread
from ..model.decoder import Model
from ..system.files import replace_file

_CHUNK = 512  # tokens of a pass


def shard_bytes(model: Model, taps: int, tokens: int) -> int:
    return tokens * (12 + (1 + taps) * model.shape.hidden * model.dtype.itemsize)


def save_rows(model: Model, taps: Sequence[int], texts: Sequence[Sequence[int]], length: int, path: Path) -> None:
    """Run the target over texts of whole blocks and save the shard. Raises OSError."""
    assert model.taps == tuple(taps), "the model leaves other rows"
    with torch_on_one_thread(model.operations.kernel):
        found = [part for text in texts for part in _passes(model, text)]
    names = ("ids", "rows", "lse", "choices")
    joined = {name: torch.cat(parts) for name, parts in zip(names, zip(*found, strict=True), strict=True)}
    replace_file(path, save({name: each.unflatten(0, (-1, length)).contiguous() for name, each in joined.items()}))


def _passes(model: Model, text: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
    """Yield ids, rows, log-sum-exps and choices of a text, chunk by chunk, on the host."""
    cache = cast(KVCache, model.new_cache(len(text)))
    for ids in torch.tensor(text, device=model.device).split(_CHUNK):
        rows = model.forward(ids, cache)
        logits = model.logits(rows)
        found = ids.int(), rows, logits.logsumexp(-1), logits.argmax(-1).int()
        yield tuple(each.cpu() for each in found)


@dataclass(frozen=True)
class Blocks:
    """Some blocks: ids, log-sum-exps, choices `[blocks, tokens]`, taps and final rows `[blocks, tokens, ...]`."""

    ids: Tensor
    taps: Tensor
    rows: Tensor
    lse: Tensor
    choices: Tensor


class Shards:
    """The blocks of several shards, by number. Files stay open, and a block is read when it is asked for."""

    def __init__(self, paths: Sequence[Path], hidden: int) -> None:
        self._files = [safe_open(path, "pt") for path in paths]
        self._hidden = hidden
        counts = [file.get_slice("ids").get_shape()[0] for file in self._files]
        self._places = [(file, at) for file, count in zip(self._files, counts, strict=True) for at in range(count)]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._places)

    def ids(self) -> Iterator[Tensor]:
        """Yield the ids, and the choices, of each shard."""
        for file in self._files:
            yield file.get_tensor("ids")
            yield file.get_tensor("choices")

    def read(self, numbers: Sequence[int], device: torch.device) -> Blocks:
        """Return the blocks of these numbers on a device; taps and rows in fp32."""

        def stacked(name: str) -> Tensor:
            places = (self._places[number] for number in numbers)
            return torch.stack([file.get_slice(name)[at] for file, at in places]).to(device)

        rows = stacked("rows")
        return Blocks(
            stacked("ids").long(),
            rows[..., self._hidden :].float(),
            rows[..., : self._hidden],
            stacked("lse"),
            stacked("choices").long(),
        )
