"""Scores of a text's last tokens, each given the true tokens before it (teacher forcing).

They are run one at a time, as in decoding: a cache that drops tokens then drops what it would drop there.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..events import Prefilled
from ..sequence import TokenSequence
from ..speculation.passes.runner import Runner


@dataclass(frozen=True, slots=True)
class TextScores:
    """The scores of a text's last tokens, in order, on the host.

    Attributes:
        log_probs: `[tokens]` fp32, the natural logarithm of the probability of each token.
        choices: `[tokens]`, the likeliest token at each position.
        seconds: `[tokens]`, of the pass and the logits that each was predicted with.
        divergences: `[tokens]`, KL(reference || this) in nats; None without a reference.
        distributions: `[tokens, vocab]` fp32, the log-probabilities of all tokens, if they were to be kept.
    """

    log_probs: Tensor
    choices: Tensor
    seconds: Tensor
    divergences: Tensor | None = None
    distributions: Tensor | None = None


def score_text(
    runner: Runner, ids: Sequence[int], last: int, keep: bool = False, reference: TextScores | None = None
) -> Generator[Prefilled, None, TextScores]:
    """Run a text `ids` and score its `last` tokens, which leaves one before them at least.

    Yields the progress of the tokens before them. With `keep`, the result can be the `reference` of later ones: of
    the same text and `last`, with its distributions.
    """
    assert 0 < last < len(ids), f"cannot score the last {last} of {len(ids)} tokens"
    sequence = TokenSequence(ids[: len(ids) - last])
    yield from runner.prefill(sequence)
    kept = torch.empty((last, runner.model.shape.vocab)) if keep else None
    log_probs, seconds = torch.empty(last), torch.empty(last, dtype=torch.float64)
    choices = torch.empty(last, dtype=torch.long)
    expected = None if reference is None else reference.distributions
    divergences = None if expected is None else torch.empty(last)
    for position, token in enumerate(ids[len(ids) - last :]):
        started = time.perf_counter()
        logits = runner.model.logits(runner.rows(sequence))[0].float().cpu()
        seconds[position] = time.perf_counter() - started
        row = logits.log_softmax(-1)
        log_probs[position], choices[position] = row[token], row.argmax()
        if kept is not None:
            kept[position] = row
        if expected is not None and divergences is not None:
            divergences[position] = _divergence(expected[position], row)
        sequence.extend([token])
    return TextScores(log_probs, choices, seconds, divergences, kept)


def _divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Return KL(reference || other) of two rows of log-probabilities; what the reference excludes counts as 0."""
    terms = reference.exp() * (reference - other)
    return terms[reference > float("-inf")].sum()


def perplexity(log_probs: Tensor) -> float:
    """Return exp of the mean negative log-probability."""
    return float(torch.exp(-log_probs.double().mean()))


def top1_agreement(reference: TextScores, other: TextScores) -> float:
    """Return the share of positions at which both find the same token likeliest, given the same tokens before."""
    return float((reference.choices == other.choices).double().mean())


def mean_divergence(other: TextScores) -> float | None:
    """Return the mean KL divergence from the reference in nats; None if there was none. Rounding may make it 0."""
    return None if other.divergences is None else max(float(other.divergences.double().mean()), 0.0)
