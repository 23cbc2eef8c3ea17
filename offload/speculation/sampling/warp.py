"""Logits -> distribution -> token. One function makes the distribution, at every level of the hierarchy.

Everything is computed on the device of the logits. The host waits for it in `sample` and `read_tokens` alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...errors import TriforceError
from ...memory.host_memory import download
from ...settings.config import Sampling
from .noise import Noise, largest, possible_tokens
from .penalties import Penalties

if TYPE_CHECKING:
    from ...constraints.masks import TokenMasks
    from ...events import MaskStatistics

_NEVER = float("-inf")
_LEAST = 1e-9  # a probability below which the bound of the likely tokens is not lowered step by step
_MASS = 2.0**52  # a probability of 1 as an integer: sums of integers are the same in any order


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution of penalised logits: temperature, top-k, top-p, min-p, softmax, in transformers' order.

    Args:
        logits: `[rows, vocab]` in fp32.

    Returns:
        `[rows, vocab]` in fp32, rows summing to 1. Temperature 0 gives one-hot rows at the largest logit. A row with a
        logit that is NaN or +inf, or without a finite logit, is all NaN; `read_tokens` raises an error for it.
    """
    best = logits.amax(dim=-1, keepdim=True)  # NaN if one of the logits is
    if sampling.greedy:
        zero = best - best  # NaN unless the best is finite
        return zero.expand_as(logits).scatter(-1, largest(logits), zero + 1)
    logits = (logits - best).div_(sampling.temperature)  # the largest is 0: no overflow at any temperature
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0):
        return logits.softmax(dim=-1)
    if logits.device.type != "cpu":
        return filtered_at_once(logits, sampling)
    for row, largest_logit in zip(logits.numpy(), best.flatten().tolist(), strict=True):
        if math.isfinite(largest_logit):
            filter_row(row, sampling)
        else:
            row.fill(math.nan)
    return logits


def filter_row(row: np.ndarray, sampling: Sampling) -> None:
    """Replace a row of logits `[vocab]`, whose largest is 0, by its distribution after top-k, top-p and min-p.

    For the CPU, where sorting a vocabulary and allocating memory for one take longest: each filter reads only the
    tokens that the one before kept, and returns the indices of those that it keeps.
    """
    ids = _top_k(row, sampling.top_k) if sampling.top_k else None
    weights = row if ids is None else row[ids]
    torch.from_numpy(weights).exp_()
    filters = (_top_p, sampling.top_p, sampling.top_p < 1), (_min_p, sampling.min_p, sampling.min_p > 0)
    for keep, value, is_on in filters:
        if is_on:
            kept = keep(weights, value)
            weights, ids = weights[kept], kept if ids is None else ids[kept]
    row.fill(0)
    row[ids] = weights / weights.sum()


def _top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the k largest logits, and of those that equal the last of them; ascending."""
    if k >= len(logits):
        return np.arange(len(logits))
    return np.flatnonzero(logits >= torch.from_numpy(logits).topk(k).values[-1].item())


def _top_p(weights: np.ndarray, p: float) -> np.ndarray:
    """Return the smallest set of the likeliest tokens whose weights are p of the sum, at least one token; ascending.

    Of equally likely tokens, those with larger ids are kept. Only the tokens above a bound are sorted; it is lowered
    until they have the mass.
    """
    mass, bound = p * float(torch.from_numpy(weights).sum()), 1 / 16  # the largest weight is 1
    ids = np.flatnonzero(weights > np.float32(bound))
    while bound > 0 and weights[ids].sum(dtype=np.float64) < mass:
        bound = bound / 16 if bound > _LEAST else 0.0
        ids = np.flatnonzero(weights > np.float32(bound))
    ordered = np.sort(weights[ids])[::-1]
    count = int(ordered.cumsum(dtype=np.float64).searchsorted(mass)) + 1
    if count < len(ids):
        least = ordered[count - 1]
        ids = ids[weights[ids] >= least]
        ids = np.delete(ids, np.flatnonzero(weights[ids] == least)[: len(ids) - count])
    return ids


def _min_p(weights: np.ndarray, min_p: float) -> np.ndarray:
    """Return the indices of the tokens that are at least so likely relative to the likeliest, whose weight is 1."""
    return np.flatnonzero(weights >= np.float32(min_p))


def filtered_at_once(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distributions `[rows, vocab]` that `filter_row` makes, but for rounding; each row by itself.

    For a GPU: few kernels, and no wait.
    """
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, _NEVER)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, stable=True)  # ascending
        # In place: there may be 30 rows.
        below = ordered.mul_(_MASS).long().cumsum_(dim=-1) <= int((1 - sampling.top_p) * _MASS)
        below[:, -1:].fill_(False)
        logits = logits.masked_fill(torch.empty_like(below).scatter_(-1, order, below), _NEVER)
    if sampling.min_p > 0:
        probs = logits.softmax(dim=-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), _NEVER)
    return logits.softmax(dim=-1)


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token from a distribution `[vocab]`, never one of probability 0; return it on the device, `[1]`.

    All randomness is the generator's. Without one, the distribution is one-hot, and nothing is drawn.
    """
    if generator is None:
        return largest(probs)
    if probs.device.type == "cpu":  # the noise of a whole vocabulary takes as long as a layer
        return _draw_by_sum(probs, generator)
    noise = torch.empty_like(probs).exponential_(generator=generator)  # an exponential race: argmax(p / e) ~ p
    return torch.div(probs, noise, out=noise).argmax(dim=-1, keepdim=True)


def _draw_by_sum(probs: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token as `draw` does, by a single random number.

    Sums are in fp64. A number below 1 times the total is below the total, also rounded: there is a first sum above it,
    and its token has a probability above 0.
    """
    row = probs.numpy()
    ids = possible_tokens(row)
    sums = probs.cumsum(0, dtype=torch.float64).numpy() if ids is None else row[ids].cumsum(dtype=np.float64)
    chance = float(torch.rand(1, generator=generator, dtype=torch.float64)) * sums[-1]
    index = min(int(sums.searchsorted(chance, side="right")), len(sums) - 1)  # of NaN none is above
    return torch.tensor([index if ids is None else ids[index]])


def uniform(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Return random numbers in [0, 1), `[count]`; without a generator zeros, as good for probabilities of 0 and 1."""
    if generator is None:
        return torch.zeros(count, device=device)
    return torch.rand(count, generator=generator, device=device)


def sample(probs: Tensor, generator: torch.Generator | None) -> int:
    """Draw one token as `draw` does, and wait for it. Raises TriforceError as `read_tokens` does."""
    return read_tokens(draw(probs, generator), probs.unsqueeze(0))[0]


def read_tokens(tokens: Tensor, rows: Tensor) -> list[int]:
    """Return tokens `[n]` drawn from the distributions `rows` `[rows, vocab]`, by one copy from the device.

    Raises:
        TriforceError: if a row is NaN.
    """
    is_nan = rows[:, :1].isnan().any(dim=0)  # every number of such a row is NaN
    *values, failed = download(torch.cat((tokens, is_nan.long())))
    if failed:
        raise _no_numbers()
    return values


def _no_numbers() -> TriforceError:
    return TriforceError("the model gave logits that are no numbers", "try --dtype float32; the weights may be damaged")


class Sampler:
    """The sampling settings, the random generator and the penalties, of one sequence."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        vocab: int,
        device: torch.device,
        breakers: Collection[int] = (),
        masks: TokenMasks | None = None,
    ) -> None:
        """`breakers` are the ids of DRY's sequence breakers.

        `masks` are those of a constraint, None without one.
        Greedy sampling has no generator: for a large vocabulary, to draw takes as long as a layer.
        """
        self.sampling = sampling
        self.vocab = vocab
        self.generator = None if sampling.greedy else torch.Generator(device).manual_seed(seed)
        self.noise = Noise(seed) if sampling.coupled and not sampling.greedy else None
        self._penalties = Penalties(sampling, vocab, device, breakers)
        self._masks = masks

    def observe_prompt(self, ids: Sequence[int]) -> None:
        """Append tokens of the prompt to the history."""
        self._penalties.observe(ids, generated=False)

    def observe(self, ids: Sequence[int]) -> None:
        """Append generated tokens to the history."""
        self._penalties.observe(ids)
        if self._masks is not None:
            self._masks.observe(ids)

    @property
    def reads_history(self) -> bool:
        """Return whether `distribution` depends on earlier tokens, which must then be known on the host."""
        return self._penalties.active or self._masks is not None

    def forced(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that a constraint dictates after the history, whatever the logits are."""
        return [] if self._masks is None else self._masks.forced(limit)

    def possible(self, tentative: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the nodes of a tree of tokens that a constraint does not rule out behind the tentative tokens."""
        if self._masks is None:
            return list(range(len(tokens)))
        return self._masks.possible(tokens, parents, tuple(tentative))

    @property
    def mask_statistics(self) -> MaskStatistics | None:
        """Return the statistics of a constraint's masks so far; None without one."""
        return None if self._masks is None else self._masks.statistics

    @torch.inference_mode()
    def distribution(
        self, logits: Tensor, tentative: Sequence[int] = (), paths: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Return the distributions `[rows, vocab]` of logits `[rows, vocab]`.

        The last row follows the history and all `tentative` tokens; each row before it follows one token less. The
        tentative tokens are not added to the history. With `paths`, each row follows the history and the tentative
        tokens of its own path.
        """
        paths = _paths(len(logits), tentative) if paths is None else paths
        return warp(self.penalised(logits, paths), self.sampling)

    @property
    def is_fixed(self) -> bool:
        """Return whether a token follows from the logits and its position alone, without chance."""
        return self.noise is not None or self.sampling.greedy

    def choose(
        self,
        logits: Tensor,
        positions: Sequence[int],
        tentative: Sequence[int] = (),
        paths: Sequence[Sequence[int]] | None = None,
    ) -> list[int]:
        """Return the token of each row of logits `[rows, vocab]`, each for its position; other arguments as above.

        It is the likeliest, the one that the noise picks, or drawn. Raises TriforceError as `read_tokens` does.
        """
        rows = self.distribution(logits, tentative, paths)
        if self.noise is not None:
            return read_tokens(self.noise.pick(rows, positions), rows)
        if self.sampling.greedy:
            return read_tokens(largest(rows).flatten(), rows)
        return read_tokens(torch.cat([draw(row, self.generator) for row in rows]), rows)

    def draw(self, probs: Tensor, position: int) -> Tensor:
        """Draw the token at a position of the sequence from a distribution `[vocab]`, as `draw` does."""
        if self.noise is None:
            return draw(probs, self.generator)
        return self.noise.pick(probs.unsqueeze(0), [position])

    @torch.inference_mode()
    def penalised(self, logits: Tensor, paths: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Return logits `[rows, vocab]` after the mask and the penalties alone; `paths` as in `distribution`."""
        paths = [()] * len(logits) if paths is None else paths
        return self._penalties.apply(self._masked(logits, paths), paths)

    def _masked(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        return logits if self._masks is None else self._masks.apply(logits, paths)


def _paths(rows: int, tentative: Sequence[int]) -> list[Sequence[int]]:
    """Return the tokens before each row of a chain: the last one has all, each before it one less."""
    if rows == 1:
        return [tentative]
    return [tentative[: max(len(tentative) - behind, 0)] for behind in reversed(range(rows))]
