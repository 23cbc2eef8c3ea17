"""The base of caches that a target runs on instead of its full cache: a cache is a file, and a row in `methods`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ..memory.tree_attention import Tree
from ..settings.config import Speculation
from .full import FullCache


class ApproximateCache(ABC):
    """A KVCache over a FullCache of the same sequence, or of what is kept of it. It has no trees.

    No layer has a window of the model's own, or linear attention.
    """

    held = 0
    is_intact = True
    has_static_steps = False
    is_dumpable = False  # whether a prompt's keys and values can be saved and restored
    windows = states = None

    def __init__(self, full: FullCache, settings: Speculation) -> None:
        """Make an empty cache with the sizes of the settings over an empty full cache."""
        self._full = full
        self.store, self.rope, self.marks = full.store, full.rope, full.marks
        self.device, self.capacity = full.device, full.capacity

    @property
    def length(self) -> int:
        return self._full.length

    @property
    @abstractmethod
    def room(self) -> int:
        """Return how many tokens the next pass may have."""

    def positions(self) -> Tensor:
        """Return the positions of the pass's tokens in the full cache."""
        return self._full.positions()

    def restartable(self, length: int) -> int:
        """Return the most tokens, up to `length`, after which a prompt goes on as it does without cached tokens."""
        return length

    def end_prompt(self) -> None:  # noqa: B027 - most caches do nothing then
        """Note that a prompt has been read; what follows is the answer."""

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        assert tree is None, "an approximate cache has no trees"
        assert 0 < tokens <= self.room, f"{tokens} tokens at once where {self.room} are the most"

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Store and attend as `KVCache.attend`."""

    def hold(self) -> None:
        raise NotImplementedError("an approximate cache has no trees")

    def commit(self, keep: Sequence[int] | None = None) -> None:
        self._full.commit(keep)

    @abstractmethod
    def truncate(self, length: int) -> int:
        """Roll back as `KVCache.truncate`."""
