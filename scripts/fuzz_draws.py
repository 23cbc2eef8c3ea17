"""What random calls of the native kernel share: drawn numbers and tensors, guarded outputs, comparisons."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 500, 511, 512, 513, 700, 1023, 1025)
GUARD = 64  # elements beside each output, which must stay as they are


class Wrong(Exception):
    """A result is not what it should be."""


class Case(NamedTuple):
    """A call: `run(tensors)` returns its results, which `judge` compares with what they should be."""

    tensors: dict[str, Tensor]
    run: Callable[[dict[str, Tensor]], list[Tensor]]
    judge: Callable[[list[Tensor]], None]


class Draw:
    """Random numbers and tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self._generator).to(dtype)

    def codes(self, *size: int, most: int = 256) -> Tensor:
        return torch.randint(0, most, size, generator=self._generator, dtype=torch.int32).to(torch.uint8)

    def one(self, *choices):
        return self.random.choice(choices)

    def count(self, most: int) -> int:
        """Return a number up to `most`, small ones and borders of blocks more often."""
        return min(self.one(self.random.randint(1, most), self.random.randint(1, 5), self.one(*BORDERS)), most)


@contextmanager
def guarded() -> Iterator[Callable[..., Tensor]]:
    """Yield a function that allocates outputs full of NaN; raise Wrong if memory beside one was written to."""
    made: list[tuple[Tensor, Tensor]] = []

    def allocate(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = torch.Size(size).numel()
        memory = torch.full((count + 2 * GUARD,), 7.0, dtype=dtype)
        inner = memory[GUARD : GUARD + count].fill_(float("nan")).view(size)
        made.append((memory, inner))
        return inner

    yield allocate
    for memory, inner in made:
        if not bool((memory[:GUARD] == 7).all() and (memory[GUARD + inner.numel() :] == 7).all()):
            raise Wrong("memory beside an output was written to")


def near(found: Tensor, expected: Tensor, limit: float, what: str = "result") -> None:
    """Raise Wrong if the relative norm of the difference is above the limit."""
    if found.shape != expected.shape:
        raise Wrong(f"{what}: {list(found.shape)}, not {list(expected.shape)}")
    error = (found.double() - expected.double()).norm().item()
    if expected.numel() and not error <= limit * expected.double().norm().item() + 1e-30:
        raise Wrong(f"{what}: an error of {error / expected.double().norm().item():.1e} where {limit:.0e} is allowed")


def equal(found: Tensor, expected: Tensor, what: str = "result") -> None:
    if not torch.equal(found, expected):
        raise Wrong(f"{what}: other bits")
