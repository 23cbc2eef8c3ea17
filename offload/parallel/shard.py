"""Shards a model: the heads, MLP columns and vocabulary rows of each rank. Shares may be uneven; none is empty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ..architecture.config import ModelShape
from ..errors import SettingsError
from ..units import counted

Part = tuple[slice, ...]  # of a tensor: some rows, or all rows and some columns
_UNITS = (64, 32, 16, 8, 4, 2, 1)  # MLP columns that stay together: the largest that divides them suits kernels best
_MIN_HEAD_SIZE = 2**22  # numbers of an output head: reading a smaller one whole costs less than gathering logits


@dataclass(frozen=True)
class Share:
    """The share of one rank. Query heads follow their KV head.

    Where there are fewer KV heads than ranks, several ranks have the same KV head, and divide its query heads.
    """

    whole: ModelShape
    rank: int
    heads: range
    kv_heads: range
    columns: range  # MLP columns
    vocab: tuple[range, ...]  # vocabulary rows of every rank

    @property
    def shape(self) -> ModelShape:
        """Return the dimensions that this rank computes with: fewer heads and columns, but the whole vocabulary."""
        heads, kv_heads, columns = len(self.heads), len(self.kv_heads), len(self.columns)
        return replace(self.whole, heads=heads, kv_heads=kv_heads, intermediate=columns)

    @property
    def stored(self) -> ModelShape:
        """Return the dimensions that this rank stores: `shape` with its own part of the vocabulary."""
        return replace(self.shape, vocab=len(self.vocab[self.rank]))

    @property
    def splits_vocab(self) -> bool:
        return len(self.vocab[self.rank]) < self.whole.vocab

    def part(self, name: str) -> Part:
        """Return the part of the tensor `name` that this rank needs."""
        *_, module, kind = name.split(".")
        rows = {
            "q_proj": _scaled(self.heads, self.whole.head_dim),
            "k_proj": _scaled(self.kv_heads, self.whole.head_dim),
            "v_proj": _scaled(self.kv_heads, self.whole.head_dim),
            "gate_proj": _scaled(self.columns),
            "up_proj": _scaled(self.columns),
            "embed_tokens": _scaled(self.vocab[self.rank]),
            "lm_head": _scaled(self.vocab[self.rank]),
        }
        columns = {"o_proj": rows["q_proj"], "down_proj": rows["up_proj"]}
        if module in columns and kind == "weight":
            return slice(None), columns[module]
        return (rows.get(module, slice(None)),)


def _scaled(numbers: range, each: int = 1) -> slice:
    return slice(numbers.start * each, numbers.stop * each)


def split(shape: ModelShape, rank: int, size: int, vocab: bool | None = None) -> Share:
    """Return the share of one rank of `size`; `vocab` says whether to shard the vocabulary, None where it pays.

    Raises SettingsError if there are more ranks than shares.
    """
    heads, kv_heads = _heads(shape, rank, size)
    unit = next(unit for unit in _UNITS if shape.intermediate % unit == 0 and shape.intermediate >= unit * size)
    columns = divide(shape.intermediate // unit, size)[rank]
    sharded = shape.vocab * shape.hidden >= _MIN_HEAD_SIZE if vocab is None else vocab
    rows = divide(shape.vocab, size) if sharded else (range(shape.vocab),) * size
    return Share(shape, rank, heads, kv_heads, range(columns.start * unit, columns.stop * unit), rows)


def divide(count: int, parts: int) -> tuple[range, ...]:
    """Divide `range(count)` into consecutive ranges; the first ones are longer by one where it is uneven."""
    size, rest = divmod(count, parts)
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return tuple(range(*ends) for ends in pairwise(starts))


def _heads(shape: ModelShape, rank: int, size: int) -> tuple[range, range]:
    most = min(shape.heads, shape.intermediate)
    if shape.kv_heads >= size:
        kv_heads = divide(shape.kv_heads, size)[rank]
        return range(kv_heads.start * shape.group, kv_heads.stop * shape.group), kv_heads
    for kv_head, ranks in enumerate(divide(size, shape.kv_heads)):
        if len(ranks) > shape.group or size > most:
            raise SettingsError(
                f"{size} ranks cannot share {counted(shape.heads, 'head')} in {counted(shape.kv_heads, 'group')}",
                f"use --tensor-parallel {min(shape.group * shape.kv_heads, most)} or fewer",
            )
        if rank in ranks:
            own = divide(shape.group, len(ranks))[rank - ranks.start]
            start = kv_head * shape.group
            return range(start + own.start, start + own.stop), range(kv_head, kv_head + 1)
    raise AssertionError(f"rank {rank} of {size}")
