"""The cache of a drafter whose tokens of a block see each other: a StreamingLLM cache of what the target computed."""

from collections.abc import Sequence

from torch import Tensor

from ..kernels.attention import attend
from .streaming_llm import StreamingCache


class DraftBlockCache(StreamingCache):
    """Attends to a window of committed slots, which have keys and values alone, and to a block that is never committed.

    `causal` says for each layer whether a token of the block sees only those before it.
    """

    causal: Sequence[bool] = ()

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values `[slots, kv_heads, head_dim]` of the pass's slots, which attend to nothing."""
        self._store(0, layer, k, v)

    def _attend_in_order(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None) -> Tensor:
        if self.causal[layer]:
            return super()._attend_in_order(layer, q, keys, values, lse)
        return attend(q, keys, values).out.to(q.dtype)
