"""Which heads, MLP columns and rows of the vocabulary each rank has. Parts may be uneven; none is empty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ..architecture.config import ModelShape
from ..errors import SettingsError
from ..units import counted

Part = tuple[slice, ...]  # of a tensor: its rows, or all of them and its columns
_UNITS = (64, 32, 16, 8, 4, 2, 1)  # columns that stay together: what kernels like, as far as it divides the whole
_WORTH = 2**22  # numbers of an output head: below, reading them all costs less than putting the logits together


@dataclass(frozen=True)
class Share:
    """What one rank has. Query heads follow their KV head; where there are fewer KV heads than ranks, several ranks
    have the same KV head, and divide its query heads."""

    whole: ModelShape
    rank: int
    heads: range
    kv_heads: range
    columns: range  # of the MLP
    vocab: tuple[range, ...]  # of every rank

    @property
    def shape(self) -> ModelShape:
        """The model as this rank computes it: fewer heads and columns, but all of the vocabulary."""
        heads, kv_heads, columns = len(self.heads), len(self.kv_heads), len(self.columns)
        return replace(self.whole, heads=heads, kv_heads=kv_heads, intermediate=columns)

    @property
    def stored(self) -> ModelShape:
        """The same with the part of the vocabulary whose rows are in this rank's memory."""
        return replace(self.shape, vocab=len(self.vocab[self.rank]))

    @property
    def splits_vocab(self) -> bool:
        return len(self.vocab[self.rank]) < self.whole.vocab

    def part(self, name: str) -> Part:
        """Of the tensor of that name what this rank needs."""
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
    """The share of a rank among `size`; `vocab` says whether the vocabulary is divided, None: where it pays.

    Raises SettingsError for more ranks than can have a part.
    """
    heads, kv_heads = _heads(shape, rank, size)
    unit = next(unit for unit in _UNITS if shape.intermediate % unit == 0 and shape.intermediate >= unit * size)
    columns = divide(shape.intermediate // unit, size)[rank]
    pays = shape.vocab * shape.hidden >= _WORTH if vocab is None else vocab
    rows = divide(shape.vocab, size) if pays else (range(shape.vocab),) * size
    return Share(shape, rank, heads, kv_heads, range(columns.start * unit, columns.stop * unit), rows)


def divide(count: int, parts: int) -> tuple[range, ...]:
    """So many things in so many runs; the first ones are one longer where it does not come out even."""
    each, more = divmod(count, parts)
    starts = [place * each + min(place, more) for place in range(parts + 1)]
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
    raise AssertionError("a rank outside of its group")
