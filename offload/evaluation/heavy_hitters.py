"""On how few tokens attention falls, and on which: the observations of H2O (arXiv 2306.14048, section 3) and of
StreamingLLM (arXiv 2309.17453, section 3.1), on the exact model.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingsError
from ..events import Prefilled
from ..memory.plain_store import PlainStore, attend_stored
from ..memory.tree_attention import Tree
from ..model.decoder import Model
from ..sequence import TokenSequence
from ..settings.method_sizes import KEPT_QUERIES
from ..speculation.passes.runner import Runner
from .attention import check_plain_attention, observable_cache, softmax_weights
from .teacher_forcing import TextScores, score_text

SMALL = 0.01  # of a query's largest weight: what is below counts as nothing, as in H2O's figure 2


@dataclass(frozen=True, slots=True)
class Concentration:
    """How concentrated attention is, means over heads and over the queries that see enough keys.

    Attributes:
        kept: `[layers]`, the share of the weights on a share of the keys, those with the most weight for each query.
        sparsity: `[layers]`, the share of the keys with less than SMALL of the largest weight.
        received: `[layers, kv_heads, tokens]`, the weights that each token has received from all queries (H2O's score).
    """

    kept: Tensor
    sparsity: Tensor
    received: Tensor


def concentration(
    runner: Runner, ids: Sequence[int], share: float = 0.05, least: int = 256
) -> Generator[Prefilled, None, Concentration]:
    """Run a text, and return how much attention falls on a `share` of the keys, for queries that see `least` of them.

    Yields the progress. Raises SettingsError where single keys cannot be read, and for a text without such a query.
    """
    shape, sequence = runner.model.shape, TokenSequence()
    if len(ids) < least:
        raise SettingsError(
            f"{len(ids):,} tokens are too few to measure attention", f"give a text of {least:,} or more"
        )
    received = torch.zeros(shape.layers, shape.kv_heads, len(ids))
    kept, sparsity = torch.zeros(shape.layers), torch.zeros(shape.layers)
    rows = max(len(ids) - least + 1, 0)
    for start in range(0, len(ids), KEPT_QUERIES):
        sequence.extend(ids[start : start + KEPT_QUERIES])
        for layer, weights in enumerate(_weights(runner, sequence, len(sequence) - start)):
            received[layer, :, : len(sequence)] += weights.unflatten(0, (shape.kv_heads, -1)).sum((1, 2)).cpu()
            seen = torch.arange(start + 1, len(sequence) + 1, device=weights.device)
            some, seen = weights[:, seen >= least], seen[seen >= least].view(-1, 1)
            if len(seen):
                most = some.topk(int(share * len(sequence)) + 1).values.cumsum(-1)
                at = (share * seen).long().clamp(min=1) - 1
                kept[layer] += most.gather(2, at.expand(len(some), -1, 1)).mean(0).sum().cpu() / rows
                small = (some < SMALL * some.amax(-1, keepdim=True)).sum(-1, keepdim=True)
                hidden = some.shape[-1] - seen  # later keys, whose weight is 0
                sparsity[layer] += ((small - hidden) / seen).mean(0).sum().cpu() / rows
        yield Prefilled(len(sequence), len(ids))
    return Concentration(kept, sparsity, received)


def mean_map(runner: Runner, ids: Sequence[int], size: int) -> Tensor:
    """Return attention weights `[layers, size, size]` by query and key, means over heads and over pieces of a text.

    Each piece of `size` tokens is run as a text of its own. Raises SettingsError as `concentration`.
    """
    assert 0 < size <= min(KEPT_QUERIES, len(ids)), f"pieces of {size} tokens"
    starts = range(0, len(ids) - size + 1, size)
    found = torch.zeros(runner.model.shape.layers, size, size)
    for start in starts:
        runner.truncate(0)
        for layer, weights in enumerate(_weights(runner, TokenSequence(ids[start : start + size]), size)):
            found[layer] += weights.mean(0).cpu() / len(starts)
    return found


def _weights(runner: Runner, sequence: TokenSequence, tokens: int) -> Iterator[Tensor]:
    """Run a sequence, and return the `softmax_weights` of its last tokens."""
    full = observable_cache(runner)
    runner.rows(sequence)
    return softmax_weights(full, tokens)


def heaviest(received: Tensor, count: int, first: int = 0) -> Tensor:
    """Return the tokens `[layers, kv_heads, count]` that have received most, of those from `first` on."""
    return first + received[:, :, first:].topk(count).indices


class _MaskedStore(PlainStore):
    """Keys and values of which some, `[layers, kv_heads, n]`, are not attended to once they are masked."""

    _kept: Tensor | None = None

    def mask(self, masked: Tensor, tokens: int) -> None:
        """Mask tokens of the first `tokens` ones, as many of each layer and KV head."""
        is_kept = torch.ones((*masked.shape[:2], tokens), device=self.device).scatter(2, masked.to(self.device), 0)
        self._kept = is_kept.argsort(dim=2, descending=True, stable=True)[:, :, : tokens - masked.shape[2]]
        self._end = tokens

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        if self._kept is None:
            return super().attend(layer, q, start, tree, lse)
        at = self._kept[layer].unsqueeze(2).expand(-1, -1, self.shape.head_dim)
        new = slice(self._end, start + len(q))
        keys, values = (torch.cat((x.gather(1, at), x[:, new]), dim=1) for x in self.layer(layer))
        return attend_stored(q, keys, values, lse)


def score_masked(
    model: Model, ids: Sequence[int], last: int, masked: Tensor | None
) -> Generator[Prefilled, None, TextScores]:
    """Read a text, and score its `last` tokens as `score_text`, with some of the tokens before them masked.

    `masked` `[layers, kv_heads, n]` are none of the tokens from the last one before them on, which is run again.
    """
    check_plain_attention(model.shape)
    store = _MaskedStore(model.shape, len(ids), model.dtype, model.device)
    cache: Any = model.new_cache(len(ids), store=store)
    runner, prompt = Runner(model, cache), TokenSequence(ids[: len(ids) - last])
    yield from runner.prefill(prompt)
    if masked is not None:
        store.mask(masked, len(prompt) - 1)
    return (yield from score_text(runner, ids, last))
