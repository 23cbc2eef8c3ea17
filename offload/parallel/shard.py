"""The ranks that share a model, their collectives, and each one's share, which may be uneven; none is empty."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor

from ..architecture.config import ModelShape
from ..errors import SettingsError
from ..units import counted


class Group(Protocol):
    """Ranks 0 to `size - 1`. All ranks make the same calls in the same order. Every call raises RankLost."""

    rank: int
    size: int
    local: int  # index of this rank among the `mates` ranks of its machine
    mates: int

    def sum(self, x: Tensor) -> Tensor:
        """Sum all ranks' `x`, of one size and dtype (all-reduce); in place, with the same bits on every rank."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return all ranks' `x` `[rows, widths[rank]]` side by side: `[rows, sum of widths]` (all-gather)."""

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """Broadcast rank 0's numbers, equally many on every rank; integers stay exact up to 2^53."""

    def broadcast(self, value: Any) -> Any:
        """Broadcast rank 0's value; the other ranks' values are ignored. It must be JSON: tuples arrive as lists."""

    def collect(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. It must be JSON, as for `broadcast`."""


class Alone:
    """A group of one."""

    rank, size = 0, 1
    local, mates = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x

    def agree(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def broadcast(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone()


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
    expert_columns: range  # columns of every expert; none without experts
    vocab: tuple[range, ...]  # vocabulary rows of every rank

    @property
    def shape(self) -> ModelShape:
        """Return the dimensions that this rank computes with: fewer heads and columns, but the whole vocabulary."""
        heads, kv_heads, columns = len(self.heads), len(self.kv_heads), len(self.columns)
        experts = self.whole.experts and replace(self.whole.experts, width=len(self.expert_columns))
        return replace(self.whole, heads=heads, kv_heads=kv_heads, intermediate=columns, experts=experts)

    @property
    def stored(self) -> ModelShape:
        """Return the dimensions that this rank stores: `shape` with its own part of the vocabulary."""
        return replace(self.shape, vocab=len(self.vocab[self.rank]))

    @property
    def counts_keys(self) -> bool:
        """Return whether this rank is the first one that has its KV heads."""
        return self.heads.start == self.kv_heads.start * self.whole.group

    @property
    def splits_vocab(self) -> bool:
        return len(self.vocab[self.rank]) < self.whole.vocab

    def part(self, name: str) -> Part:
        """Return the part of the tensor `name` that this rank needs."""
        *_, module, kind = name.split(".")
        mlp = _scaled(self.expert_columns if ".experts." in name else self.columns)
        rows = {
            "q_proj": _scaled(self.heads, self.whole.head_dim),
            "k_proj": _scaled(self.kv_heads, self.whole.head_dim),
            "v_proj": _scaled(self.kv_heads, self.whole.head_dim),
            "self_attn": _scaled(self.heads),  # of its sinks
            "gate_proj": mlp,
            "up_proj": mlp,
            "embed_tokens": _scaled(self.vocab[self.rank]),
            "lm_head": _scaled(self.vocab[self.rank]),
        }
        if any(spec.qk_norm == "projection" for spec in self.whole.specs):  # norms over all ranks' heads together
            rows |= {"q_norm": rows["q_proj"], "k_norm": rows["k_proj"]}
        columns = {"o_proj": rows["q_proj"], "down_proj": rows["up_proj"]}
        if module in columns and kind == "weight":
            return slice(None), columns[module]
        return (rows.get(module, slice(None)),)


def _scaled(numbers: range, size: int = 1) -> slice:
    return slice(numbers.start * size, numbers.stop * size)


def split(shape: ModelShape, rank: int, size: int, vocab: bool | None = None) -> Share:
    """Return the share of one rank of `size`; `vocab` says whether to shard the vocabulary, None where it pays.

    Raises SettingsError if there are more ranks than shares.
    """
    if size > 1 and shape.unshared:
        raise SettingsError(f"this model cannot be shared by ranks: {shape.unshared}", "use --tensor-parallel 1")
    heads, kv_heads = _heads(shape, rank, size)
    columns = _columns(shape.intermediate, rank, size)
    expert_columns = _columns(shape.experts.width, rank, size) if shape.experts else range(0)
    sharded = shape.vocab * shape.hidden >= _MIN_HEAD_SIZE if vocab is None else vocab
    rows = divide(shape.vocab, size) if sharded else (range(shape.vocab),) * size
    return Share(shape, rank, heads, kv_heads, columns, expert_columns, rows)


def _columns(width: int, rank: int, size: int) -> range:
    """Return the columns of one rank of an MLP `width` wide, which has at least as many as there are ranks."""
    unit = next(unit for unit in _UNITS if width % unit == 0 and width >= unit * size)
    columns = divide(width // unit, size)[rank]
    return range(columns.start * unit, columns.stop * unit)


def divide(count: int, parts: int) -> tuple[range, ...]:
    """Divide `range(count)` into consecutive ranges; the first ones are longer by one where it is uneven."""
    size, longer = divmod(count, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(range(*ends) for ends in pairwise(starts))


def _heads(shape: ModelShape, rank: int, size: int) -> tuple[range, range]:
    most = min(shape.heads, *shape.mlp_widths)
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
