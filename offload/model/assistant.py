"""The assistants of Gemma 4: layers with queries alone, which attend to the keys and values of the target.

Those of a layer are the target's of its last layer of that kind that has some. So an assistant has no cache, and all of
its queries stand at the position behind the tokens that the target has run.
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..architecture.assistant_shape import AssistantShape
from ..kernels.ops import Linear
from ..memory.tree_attention import Tree
from .heads import Head


class Lender(Protocol):
    """A cache of the target: its keys and values, as `FullCache.lend` and `InFlightTokens.lend_window` give them."""

    def lend(self, layer: int, q: Tensor) -> Tensor: ...

    def lend_window(self, layer: int, q: Tensor) -> Tensor: ...


class Assistant(Head):
    """An assistant with its weights."""

    def __init__(self, *weights: Any, post: Linear, head: Linear, centroids: tuple[Linear, Tensor] | None) -> None:
        """Create an assistant; `weights` are those of `Head`.

        Args:
            post: `[hidden of the target, hidden]`.
            head: `[vocab, hidden]`.
            centroids: `[centroids, hidden]`, and the tokens of each, `[centroids, vocab / centroids]`.
        """
        super().__init__(*weights)
        self._post, self._head, self._centroids = post, head, centroids

    @property
    def read_cost(self) -> float:
        return super().read_cost + sum(x.nbytes for x in self._post.tensors())

    def features(self, rows: Tensor) -> Tensor:
        return self.target.normed(rows).clone()

    def recycled(self, rows: Tensor) -> Tensor:
        return self._post(self._norm(rows, self._output_norm)).clone()

    @torch.inference_mode()
    def run(self, ids: Tensor, features: Tensor, cache: Any, tree: Tree | None = None) -> Tensor:
        """Run tokens `[tokens]` with `features` `[tokens, hidden of the target]`; return rows `[tokens, hidden]`.

        The `cache` is a Lender. None of them sees another one, whatever the `tree` is.
        """
        x = self._fc(torch.cat((self.target.embed(ids), features), dim=1)).clone()
        for index, layer in enumerate(self._layers):
            step = self._passes[index % len(self._passes)]
            x = step.run(layer, x, partial(self._attend, cache, bool(step.spec.window)))
        return x

    def _attend(self, cache: Lender, slides: bool, q: Tensor, k: None = None, v: None = None) -> Tensor:
        """Attend with queries `[tokens, heads, head_dim]`, all of which see the same keys.

        The kernels take as many heads as the target has, so the queries of a KV head are put together anew.
        """
        shape = self.target.shape.sliding_attention if slides else self.target.shape.full_attention
        lend = cache.lend_window if slides else cache.lend
        tokens, heads, dim = q.shape
        both = q.unflatten(1, (shape.kv_heads, -1)).transpose(0, 1).reshape(shape.kv_heads, -1, dim)
        missing = -both.shape[1] % shape.group
        rows = torch.nn.functional.pad(both, (0, 0, 0, missing)).unflatten(1, (-1, shape.group)).transpose(0, 1)
        parts = [lend(shape.layers - 1, row.reshape(1, -1, dim)).clone() for row in rows]
        out = torch.cat(parts).unflatten(1, (shape.kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        return out[:, : both.shape[1]].unflatten(1, (tokens, -1)).transpose(0, 1).reshape(tokens, heads, dim)

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        normed = self._norm(rows, self._output_norm)
        logits, own = self._head.wide(normed), self.own
        if self._centroids is None:
            return logits
        assert isinstance(own, AssistantShape)
        centroids, tokens = self._centroids
        best = tokens[centroids.wide(normed).topk(own.best).indices].flatten(1)
        return torch.full_like(logits, float("-inf")).scatter_(1, best, logits.gather(1, best))
