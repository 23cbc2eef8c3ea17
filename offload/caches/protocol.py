"""The KV cache protocol: what the decoder asks of a cache in a pass, and what speculation asks between passes.

The decoder calls the cache for attention. The cache also rotates keys and queries, because a cache that drops tokens
(StreamingLLM, H2O) renumbers the positions of the others.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor

from ..kernels.delta_rule import DeltaRule
from ..memory.tree_attention import Tree


class Attends(Protocol):
    """Attention as a decoder layer calls it."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        """Store the in-flight keys and values, and attend causally to them and to all committed ones.

        Of a tree in flight, each token attends to its ancestors and itself instead.
        q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, not rotated yet;
        returns `[tokens, heads, head_dim]`. `layer` counts the layers that attend to all tokens, and have k and v.
        Without k and v, attends to those that the pass has stored in that layer.
        `lse` `[tokens, heads]` in fp32, if given, is filled with the log-sum-exp; only models with sinks give it.
        """

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        """Store and attend as `attend`, for number `layer` of those layers that attend to a window."""

    def attend_linear(self, layer: int, rule: DeltaRule, rows: Tensor, gates: Tensor) -> Tensor:
        """Run the in-flight tokens behind the committed ones, for number `layer` of those with linear attention.

        `rows` and `gates` are those of `run_delta_rule`, as is what it returns.
        """

    def positions(self) -> Tensor:
        """Return the positions in the sequence of the tokens of the pass under way, `[tokens]`, on the device."""


class KVCache(Attends, Protocol):
    """Keys and values of the committed tokens, and attention over them.

    One forward pass is `begin`, then `attend` once a layer in order, then `commit`. Until `commit` the pass has not
    happened: an exception in between leaves the cache at its committed `length`, and the next `begin` starts over.

    A pass over a tree ends with `hold` instead. The next pass may add tokens to the tree. `commit` then keeps one path.

    One that `has_static_steps` is a StaticCache.
    """

    @property
    def has_static_steps(self) -> bool:
        """Return whether passes of a few tokens can be filled up to a fixed number of rows, of tensors that stay."""

    @property
    def length(self) -> int:
        """Return the number of committed tokens."""

    @property
    def is_intact(self) -> bool:
        """Return whether the committed tokens can be continued; else the sequence has to start over."""

    @property
    def held(self) -> int:
        """Return how many tokens of a tree are in flight from passes that have ended; 0 if they are lost.

        They are lost if anything but `hold`, a pass over the same tree, or `commit` follows.
        """

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        """Begin a pass over `tokens` tokens behind the committed ones. Raises AssertionError beyond capacity.

        With a `tree`, they are its last ones; those before them, if there are any, are held.
        """

    def hold(self) -> None:
        """End a pass over a tree; its tokens stay in flight."""

    def commit(self, keep: Sequence[int] | None = None) -> None:
        """Commit the in-flight tokens; of held ones, the path `keep`: indices in the tree from the root down."""

    def truncate(self, length: int) -> int:
        """Roll back to the first `length` tokens, at most the committed length.

        Returns the new length, 0 if the cache has dropped tokens that it would need and has to start over.
        """


class StaticStep(Attends, Protocol):
    """Attention of a pass of a fixed number of rows over one cache."""

    def load(self) -> None:
        """Set the inputs, in a few launches and without waiting, for the pass that the cache has begun."""

    def load_ahead(self) -> None:
        """Set inputs to record with, between passes: what is stored lies where no token is kept."""


class StaticCache(KVCache, Protocol):
    """A cache that can fill up passes of few tokens to a fixed number of rows, in tensors that stay where they are."""

    def fits(self, rows: int) -> bool:
        """Return whether so many rows can follow the committed tokens now."""

    def begin_padded(self, tokens: int, rows: int) -> None:
        """Begin a pass over `tokens` tokens as `begin` does, filled up to `rows` rows, which fit."""

    def step_key(self) -> Hashable:
        """Return what else a recording depends on beside its rows; it serves as long as this is the same."""

    def new_step(self, rows: int) -> StaticStep:
        """Return a step of `rows` rows, whose tensors are allocated here and nowhere else."""

    def clear(self) -> None:
        """Set all keys and values to zero: masked values are multiplied by zero, so they must not be NaN."""
