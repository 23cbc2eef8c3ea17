"""Page formats: how keys and values of consecutive tokens of one layer lie in memory, and attention over them.

A page is contiguous, so it is transferred in one copy. Its partial result does not depend on where
it is computed, nor on the other pages; with the native kernel on a CPU it is the same bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows, rotate
from ..kernels import triton
from ..kernels.accumulate import Accumulator, KernelAccumulator, TorchAccumulator
from ..kernels.attention import attend, attend_causal, attend_masked, state_of
from ..kernels.native import Kernel
from ..kernels.native.calls import BlockCalls
from ..kernels.native.layout import key_view, keys_of, value_view, values_of, write_blocks
from ..kernels.native.structs import BLOCK
from ..kernels.triton.accumulate import TritonAccumulator
from .tree_attention import Tree


class PageRun(NamedTuple):
    """Consecutive pages of a layer, in any order in one memory: `memory` `[n, numbers]`, read in `order`."""

    memory: Tensor
    order: tuple[int, ...]


class PageLayout(ABC):
    """Pages of `tokens` tokens, each `[numbers]`, on the host or the device: what tiers ask of a format."""

    tokens: int
    numbers: int

    @property
    def host(self) -> PageLayout:
        """The same layout for pages and queries in host memory."""
        return self

    @abstractmethod
    def parts(self, pages: Tensor) -> Tensor:
        """View pages `[..., numbers]` as parts `[..., kv_heads, parts, ...]`, of tokens that are read together."""

    @abstractmethod
    def attend_whole(self, page: Tensor, q: Tensor) -> Any:
        """Return a partial result of rotated queries over all tokens of a page."""

    @abstractmethod
    def accumulator(self, q: Tensor) -> Accumulator:
        """Return an empty accumulator of partial results for rotated queries `[tokens, heads, head_dim]`."""


class PageFormat(PageLayout):
    """A layout of keys and values as they are, with attention over it.

    Attributes:
        least_chunk: tokens of a part, which can only be selected together.
        kernel: the native kernel, if it attends to them.
        dumps_parts: whether stores in one memory dump tokens as parts, too; else as keys and values.
    """

    least_chunk: int
    kernel: Kernel | None = None
    dumps_parts = False
    _size: tuple[int, ...]  # of a page

    @abstractmethod
    def append(self, page: Tensor, at: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, rotated: Tensor) -> None:
        """Store tokens from position `at` of the page on, and write their rotated queries to `rotated`.

        q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`.
        """

    def attend(self, page: Tensor, q: Tensor, seen: int, causal: bool = False) -> Any:
        """Attend to the first `seen` tokens with rotated queries; if causal, each further query sees one more.

        Returns a partial result for an accumulator of the same format.
        """
        k, v = self.read(page)
        if not causal or len(q) == 1:
            return attend(q, k[:, :seen], v[:, :seen])
        seen += len(q) - 1
        return attend_causal(q, k[:, :seen], v[:, :seen])

    def attend_whole(self, page: Tensor, q: Tensor) -> Any:
        return self.attend(page, q, self.tokens)

    def attend_tree(self, pages: PageRun, q: Tensor, before: int, tree: Tree, result: Accumulator) -> None:
        """Add attention to a tree and the tokens before it: of all rows of `result`, rotated queries of its last ones.

        In the pages, the tree comes behind the first `before` tokens, all of which are in the first page. On any
        device: by a mask, of the tree's tokens alone.
        """
        if before:
            result.attend(pages.memory[pages.order[0]], slice(0, len(q)), before)
        both = []
        for index, slot in enumerate(pages.order):
            first, end = (position - index * self.tokens for position in (before, before + len(tree)))
            first, end = max(first, 0), min(end, self.tokens)
            begin = first // self.least_chunk
            some = self.parts(pages.memory[slot])[:, begin : -(-end // self.least_chunk)]
            inside = slice(first - begin * self.least_chunk, end - begin * self.least_chunk)
            both.append([y[:, inside] for y in self.read_parts(some)])
        keys, values = (torch.cat(x, dim=1) for x in zip(*both, strict=True))
        own = attend_masked(q, keys, values, tree.on(q.device).sees[-len(q) :])
        result.add_state(state_of(own))

    def parts(self, pages: Tensor) -> Tensor:
        return pages.unflatten(-1, self._size)

    @abstractmethod
    def read_parts(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[n, count * least_chunk, head_dim]` of selected parts `[n, count, ...]`."""

    def read(self, page: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[kv_heads, tokens, head_dim]`: views or copies."""
        return self.read_parts(self.parts(page))

    def plain(self, arrived: Tensor) -> Tensor:
        """Return a page `[numbers]` as it is, from what has arrived over the link."""
        return arrived

    @abstractmethod
    def write(self, page: Tensor, at: int, keys: Tensor, values: Tensor) -> None:
        """Store rotated keys and values `[kv_heads, n, head_dim]` from position `at` of the page on."""

    @abstractmethod
    def plain_views(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """View pages `[n, numbers]` as keys and values in plain order, `[kv_heads, n, ...]`.

        Plain ones `[kv_heads, n * tokens, head_dim]` can be viewed in the same shape, so either is copied to the other
        in one operation.
        """


class BlockPageFormat(PageFormat):
    """The native kernel's blocks `[kv_heads, tokens / 16, 2 * 16 * head_dim]`, on a device that it does not serve.

    The native kernel attends to them on the host, if there is one, Triton's on the GPU; without Triton they are
    converted to plain keys and values first.
    """

    least_chunk = BLOCK

    def __init__(self, shape: ModelShape, tokens: int, kernel: Kernel | None = None) -> None:
        """`kernel` is the native one, if it attends on the host."""
        assert tokens % BLOCK == 0, "pages are whole blocks"
        self.tokens, self._shape, self.kernel = tokens, shape, kernel
        self.numbers = 2 * shape.kv_heads * tokens * shape.head_dim
        self._size = (shape.kv_heads, tokens // BLOCK, 2 * BLOCK * shape.head_dim)

    @property
    def host(self) -> BlockPageFormat:
        return self if self.kernel is None else NativePageFormat(self._shape, self.tokens, self.kernel)

    def append(self, page: Tensor, at: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, rotated: Tensor) -> None:
        positions = torch.arange(at, at + len(k), device=page.device)
        new = [x.transpose(0, 1) for x in (rotate(k, rows), v)]
        write_blocks(page.view(self._size), self._shape.head_dim, positions, *new)
        rotated.copy_(rotate(q, rows))

    def accumulator(self, q: Tensor) -> Accumulator:
        if triton.serves(q) and q.dtype == torch.bfloat16:  # blocks of fp32 are not paired
            return TritonAccumulator(q, self._size[0], self._blocks)
        return TorchAccumulator(q, self.attend)

    def _blocks(self, page: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return a page as Triton's kernel takes blocks."""
        blocks = page.view(self._size)
        return blocks, blocks, triton.BLOCKS

    def write(self, page: Tensor, at: int, keys: Tensor, values: Tensor) -> None:
        positions = torch.arange(at, at + keys.shape[1], device=page.device)
        write_blocks(page.view(self._size), self._shape.head_dim, positions, keys, values)

    def plain_views(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        blocks, dim = self.parts(pages).transpose(0, 1), self._shape.head_dim
        return key_view(blocks, dim), value_view(blocks, dim)

    def read_parts(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        dim = self._shape.head_dim
        return keys_of(parts, dim).flatten(1, 2), values_of(parts, dim).flatten(1, 2)


class NativePageFormat(BlockPageFormat):
    """Blocks in host memory, attended to by the native kernel; partial results are merged as it merges its own.

    If a page is a multiple of the kernel's PIECE, attention has the same bits as over a `BlockStore`.
    """

    dumps_parts = True

    def __init__(self, shape: ModelShape, tokens: int, kernel: Kernel) -> None:
        super().__init__(shape, tokens, kernel)
        self._native, self._calls = kernel, BlockCalls(shape, tokens // BLOCK)

    def append(self, page: Tensor, at: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, rotated: Tensor) -> None:
        self._native.append(self._calls.append(page, at, q, k, v, rows, rotated))

    def attend(self, page: Tensor, q: Tensor, seen: int, causal: bool = False) -> Tensor:
        return self._calls.partials(self._native, page, q, seen, causal)

    def attend_tree(self, pages: PageRun, q: Tensor, before: int, tree: Tree, result: Accumulator) -> None:
        """Attend in one call. If a page is a multiple of PIECE, each row has the bits of the chain that its path is."""
        parents = tree.on(q.device).parents
        table = _block_table(pages.order, *self._size[:2])
        part = self._calls.partials(self._native, pages.memory, q, before + 1, table=table, parents=parents)
        result.add(slice(0, len(q)), part)

    def accumulator(self, q: Tensor) -> Accumulator:
        return KernelAccumulator(self._native, q, self.attend)


@lru_cache(maxsize=64)
def _block_table(order: tuple[int, ...], kv_heads: int, blocks: int) -> Tensor:
    """Return a table, as of `BlockCalls.attention`, for pages of `blocks` blocks a head. Do not write to it."""
    numbers = [page * kv_heads * blocks + block for page in order for block in range(blocks)]
    with torch.inference_mode(False):
        return torch.tensor([numbers] * kv_heads, dtype=torch.int32)
