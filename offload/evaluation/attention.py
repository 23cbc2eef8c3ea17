"""How much of the attention falls on the keys that a selection keeps (TriForce, arXiv 2404.11912: sparsity).

Every token attends to all keys, as in exact decoding. Measured is the share of its softmax weights that the tokens kept
by a selection receive, made at the end of the prompt or some tokens ago: among the tokens that it was made of, as in
the paper. What is newer is in every cache, and would make an old selection look better than a new one.
"""

from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..caches.full import FullCache
from ..caches.selection import Selector, choose
from ..errors import SettingsError
from ..events import Prefilled
from ..sequence import TokenSequence
from ..speculation.passes.runner import Runner

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a selection keeps: `chunks` of `size` tokens that the selector selects, anew after `every` tokens.

    Without a selector the tokens with the most weight at each step, of which no selection recovers more, or, if they
    are `fixed`, those with the most weight of the last token before the selection; without `every` it selects once.
    """

    selector: Selector | None
    chunks: int
    size: int
    every: int | None = None
    fixed: bool = False

    def is_due(self, tokens: int) -> bool:
        """Return whether to select after so many tokens."""
        return tokens == 0 or (self.every is not None and tokens % self.every == 0)


@dataclass(frozen=True, slots=True)
class _Selection:
    """Chunks `[layers * kv_heads, chunks]` of `size` of the first `end` tokens; None for those with the most weight."""

    chosen: Tensor | None
    end: int
    size: int


def recovered_attention(
    runner: Runner, ids: Sequence[int], last: int, policies: Mapping[Name, Policy]
) -> Generator[Prefilled, None, dict[Name, Tensor]]:
    """Run a text and return the share of the attention of its `last` tokens that each policy recovers.

    Yields the progress of the tokens before them. The shares are `[last, layers]`, means over the heads, of the weight
    on the tokens that were there when the selection was made. Raises SettingsError where single keys cannot be read.
    """
    full = observable_cache(runner)
    full.followers.update(each.selector for each in policies.values() if hasattr(each.selector, "observe"))
    sequence = TokenSequence(ids[: len(ids) - last])
    yield from runner.prefill(sequence)
    runner.rows(sequence)
    shares = {name: torch.empty(last, full.store.shape.layers) for name in policies}
    made: dict[Name, _Selection] = {}
    for at, token in enumerate(ids[len(ids) - last :]):
        made |= {name: _select(policy, full) for name, policy in policies.items() if policy.is_due(at)}
        sequence.extend([token])
        runner.rows(sequence)
        for layer, weights in enumerate(_weights(full)):
            for name, policy in policies.items():
                shares[name][at, layer] = _share(weights, made[name], layer, policy)
    return shares


def observable_cache(runner: Runner) -> FullCache:
    """Return a runner's cache, which keeps queries from now on. Raises SettingsError if single keys cannot be read."""
    check_plain_attention(runner.model.shape)
    full = runner.cache
    if not isinstance(full, FullCache) or full.store.grain != 1:
        raise SettingsError("attention is measured with torch's attention, token by token", "add --kernel off")
    full.keep_queries()
    return full


def check_plain_attention(shape: ModelShape) -> None:
    """Raise SettingsError unless all layers attend to all keys, by nothing but the softmax of scaled products."""
    if not shape.is_uniform or shape.has_sinks or shape.borrowing[0]:
        raise SettingsError(
            f"attention of {shape.family} is not measured: its layers differ, or more than products decide",
            "use a model like Llama, Qwen2, Qwen3 or SmolLM2",
        )


def softmax_weights(full: FullCache, tokens: int) -> Iterator[Tensor]:
    """Yield the softmax weights of the newest `tokens` queries in each layer, `[heads, tokens, keys]`.

    They are at most as many as the last pass had, and KEPT_QUERIES.
    """
    shape, keys = full.store.shape, full.length
    queries = torch.stack(full.queries(tokens)[::-1], dim=2).float()  # [layers, heads, tokens, head_dim]
    later = torch.ones(tokens, keys, dtype=torch.bool, device=queries.device).triu(keys - tokens + 1)
    for layer, each in enumerate(queries):
        own = full.store.mean_keys(layer, 0, keys, 1).unsqueeze(1)  # of chunks of one token
        scores = each.unflatten(0, (shape.kv_heads, -1)) * shape.head_dim**-0.5 @ own.transpose(2, 3)
        yield scores.flatten(0, 1).masked_fill(later, float("-inf")).softmax(-1)


def _select(policy: Policy, full: FullCache) -> _Selection:
    chunks = full.length // policy.size
    end = chunks * policy.size
    if policy.selector is not None:
        return _Selection(choose(policy.selector, full, chunks, policy.chunks), end, policy.size)
    if not policy.fixed:
        return _Selection(None, end, policy.size)
    kept = min(policy.chunks * policy.size, end)
    return _Selection(torch.cat([each[:, :end].topk(kept).indices for each in _weights(full)]), end, 1)


def _weights(full: FullCache) -> Iterator[Tensor]:
    """Yield the newest query's softmax weights of each layer, means over the heads of a KV head: `[kv_heads, n]`."""
    for weights in softmax_weights(full, 1):
        yield weights.unflatten(0, (full.store.shape.kv_heads, -1)).mean((1, 2))


def _share(weights: Tensor, selection: _Selection, layer: int, policy: Policy) -> Tensor:
    """Return a selection's share of a layer's weights `[kv_heads, n]` on the tokens that it was made of."""
    before = weights[:, : selection.end]
    if selection.chosen is None:
        kept = before.topk(min(policy.chunks * policy.size, selection.end)).values
    else:
        chosen = selection.chosen.unflatten(0, (-1, len(weights)))[layer].to(weights.device).long()
        kept = before.unflatten(1, (-1, selection.size)).sum(2).gather(1, chosen)
    return (kept.sum(1) / before.sum(1)).mean()
