"""Steps: the forward passes of one sequence of a batch, which runs those of several sequences as one."""

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

    `keys` is how many keys it attends to, nearly. `graphs` run passes of a few tokens over this cache alone; None if
    they cannot be recorded.
    """

    model: Model
    cache: KVCache
    ids: Tensor
    keys: int
    tree: Tree | None = None
    graphs: StepGraphs | None = None

    def run(self) -> Tensor:
        """Run the pass by itself; return its hidden rows `[tokens, hidden]`."""
        if self.graphs is not None and self.graphs.serves(len(self.ids), self.tree):
            return self.graphs.forward(self.ids)
        return self.model.forward(self.ids, self.cache, self.tree)


class Lane(Protocol):
    """Runs the passes of one sequence of a batch with those of others, and returns when they are done."""

    def clock(self) -> float:
        """Return the time in seconds; methods measure differences of it."""

    def forward(self, step: Step) -> Tensor:
        """Run a step; return its hidden rows `[tokens, hidden]`."""

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` in fp32 of hidden rows `[tokens, hidden]`."""
