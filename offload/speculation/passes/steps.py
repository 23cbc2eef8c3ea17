"""Steps: the forward passes that runners ask for. An executor may run those of several sequences as one."""

import time
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...caches.protocol import KVCache
from ...memory.tree_attention import Tree
from ...model.decoder import Model
from .cuda_graphs import StepGraphs


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass of `ids` `[tokens]` behind the tokens in a cache; with a `tree`, they are its last tokens.

    `keys` is how many keys it attends to, nearly. `recorded` runs passes of a few tokens over this cache alone; None if
    they cannot be recorded.
    """

    model: Model
    cache: KVCache
    ids: Tensor
    keys: int
    tree: Tree | None = None
    recorded: StepGraphs | None = None

    def run(self) -> Tensor:
        """Run the pass by itself; return its hidden rows `[tokens, hidden]`."""
        if self.recorded is not None and self.recorded.serves(len(self.ids), self.tree):
            return self.recorded.forward(self.ids, self.tree)
        if self.tree is None:
            return self.model.forward(self.ids, self.cache)
        return self.model.forward_tree(self.ids, self.cache, self.tree)


class Executor(Protocol):
    """Executes what runners ask for, and returns when it is done."""

    def clock(self) -> float:
        """Return the time in seconds; methods measure differences of it."""

    def hidden(self, step: Step) -> Tensor:
        """Run a step; return its hidden rows `[tokens, hidden]`."""

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` in fp32 of hidden rows `[tokens, hidden]`."""


class AtOnce:
    """Executes every step at once, by itself."""

    clock = staticmethod(time.perf_counter)
    hidden = staticmethod(Step.run)

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        return model.logits(hidden)


AT_ONCE = AtOnce()
