"""Logits -> distribution -> token. One function makes the distribution, at every level of the hierarchy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import Sampling
from ..errors import TriforceError

_NEVER = float("-inf")


def warp(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Return the distribution: repetition penalty, temperature, top-k, top-p, min-p, softmax, in transformers' order.

    Args:
        logits: `[rows, vocab]` in fp32.
        seen: bool `[vocab]` or `[rows, vocab]`: tokens in the context of each row, for the repetition penalty.

    Returns:
        `[rows, vocab]` in fp32, rows summing to 1. Temperature 0 gives one-hot rows at the largest logit.

    Raises:
        TriforceError: if a logit is NaN or a row has no finite logit.
    """
    if sampling.repetition_penalty != 1 and seen is not None:
        logits = penalise(logits, sampling.repetition_penalty, seen)
    best = logits.amax(dim=-1, keepdim=True)
    if not torch.isfinite(best).all():  # amax carries NaN along
        raise TriforceError(
            "the model gave logits that are no numbers", "try --dtype float32; the weights may be damaged"
        )
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = (logits - best) / sampling.temperature  # the largest is 0: no overflow at any temperature
    if sampling.top_k:
        logits = _keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = _keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        probs = logits.softmax(dim=-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), _NEVER)
    return logits.softmax(dim=-1)


def penalise(logits: Tensor, penalty: float, seen: Tensor) -> Tensor:
    """Return logits `[..., vocab]` with those of `seen` tokens (bool, broadcast) lowered (arXiv 1909.05858)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, _NEVER)


def _keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of the likeliest tokens whose probabilities sum to p; always at least one token."""
    probs = logits.softmax(dim=-1)
    # Tokens below this sum to less than 1 - p, so none of them is kept: only the few others are sorted.
    likely = (probs > (1 - p) / logits.shape[-1]) | (probs == probs.amax(dim=-1, keepdim=True))
    unlikely_mass = probs.masked_fill(likely, 0).sum(dim=-1)
    kept = torch.full_like(logits, _NEVER)
    for row, candidates in enumerate(likely):
        tokens = candidates.nonzero().squeeze(-1)
        ordered, order = probs[row, tokens].sort(stable=True)  # ascending; stable: equal rows break ties alike
        above = ordered.cumsum(dim=-1) + unlikely_mass[row] > 1 - p
        above[-1] = True
        tokens = tokens[order[above]]
        kept[row, tokens] = logits[row, tokens]
    return kept


def sample(probs: Tensor, generator: torch.Generator) -> int:
    """Draw one token from a distribution `[vocab]`, never one of probability 0. All randomness is the generator's."""
    noise = torch.empty_like(probs).exponential_(generator=generator)  # an exponential race: argmax(p / e) ~ p
    return int((probs / noise).argmax())


class Sampler:
    """The sampling settings, the random generator and the tokens seen so far, of one sequence."""

    def __init__(self, sampling: Sampling, seed: int, vocab: int, device: torch.device) -> None:
        self.sampling = sampling
        self.vocab = vocab
        self.generator = torch.Generator(device).manual_seed(seed)
        # Only the repetition penalty needs the tokens seen.
        penalises = sampling.repetition_penalty != 1
        self._seen = torch.zeros(vocab, dtype=torch.bool, device=device) if penalises else None

    def observe(self, ids: Sequence[int] | Tensor) -> None:
        """Append tokens to the history."""
        if self._seen is not None:
            self._seen[torch.as_tensor(ids, dtype=torch.long, device=self._seen.device)] = True

    @torch.inference_mode()
    def distribution(self, logits: Tensor, tentative: Sequence[int] = ()) -> Tensor:
        """Return the distributions `[rows, vocab]` of logits `[rows, vocab]`.

        The last row follows the history and all `tentative` tokens; each row before it follows one token less. The
        tentative tokens are not added to the history.
        """
        return warp(logits, self.sampling, self._seen_before(len(logits), tentative))

    @torch.inference_mode()
    def penalised(self, logits: Tensor) -> Tensor:
        """Return logits `[rows, vocab]` after the repetition penalty alone, for the history."""
        return logits if self._seen is None else penalise(logits, self.sampling.repetition_penalty, self._seen)

    def _seen_before(self, rows: int, tentative: Sequence[int]) -> Tensor | None:
        if self._seen is None or not tentative:
            return self._seen
        seen = self._seen.repeat(rows, 1)
        for position, token in enumerate(reversed(tentative)):
            seen[max(rows - 1 - position, 0) :, token] = True
        return seen
