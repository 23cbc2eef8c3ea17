"""Scores of a text's last tokens, each given the true tokens before it (teacher forcing).

They are run one at a time, as in decoding: a cache that drops tokens then drops what it would drop there.

Also the sliding window with recomputation, to which StreamingLLM compares itself (arXiv 2309.17453, section 3.1): every
token is predicted from the latest tokens alone, which are run anew for it as a text of their own. It needs no sink, and
each token costs as much as reading the window.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..events import Prefilled
from ..model.decoder import Model
from ..sequence import TokenSequence
from ..speculation.passes.runner import Runner


class Predictor(Protocol):
    """What predicts the tokens of a text: a Runner, whose cache decides what it sees, or Recomputed."""

    @property
    def model(self) -> Model: ...

    def prefill(self, sequence: TokenSequence) -> Generator[Prefilled]:
        """Read a sequence before its last token is predicted from; yield the progress."""

    def rows(self, sequence: TokenSequence) -> Tensor:
        """Return the hidden row `[1, hidden]` of the sequence's last token."""


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
    predictor: Predictor, ids: Sequence[int], last: int, keep: bool = False, reference: TextScores | None = None
) -> Generator[Prefilled, None, TextScores]:
    """Run a text `ids` and score its `last` tokens, which leaves one before them at least.

    Yields the progress of the tokens before them. With `keep`, the result can be the `reference` of later ones: of
    the same text and `last`, with its distributions.
    """
    assert 0 < last < len(ids), f"cannot score the last {last} of {len(ids)} tokens"
    sequence = TokenSequence(ids[: len(ids) - last])
    yield from predictor.prefill(sequence)
    vocab = predictor.model.shape.vocab
    kept = torch.empty((last, vocab)) if keep else None
    log_probs, seconds = torch.empty(last), torch.empty(last, dtype=torch.float64)
    choices = torch.empty(last, dtype=torch.long)
    divergences = None if reference is None else torch.empty(last)
    for position, token in enumerate(ids[len(ids) - last :]):
        started = time.perf_counter()
        logits = predictor.model.logits(predictor.rows(sequence))[0].float().cpu()
        seconds[position] = time.perf_counter() - started
        row = logits.log_softmax(-1)
        log_probs[position], choices[position] = row[token], row.argmax()
        if kept is not None:
            kept[position] = row
        if divergences is not None:
            divergences[position] = _divergence(reference.distributions[position], row)
        sequence.extend([token])
    return TextScores(log_probs, choices, seconds, divergences, kept)


def _divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Return KL(reference || other) of two rows of log-probabilities; what the reference excludes counts as 0."""
    terms = reference.exp() * (reference - other)
    return terms[reference > float("-inf")].sum()


def perplexity(log_probs: Tensor) -> float:
    """Return exp of the mean negative log-probability."""
    return float(torch.exp(-log_probs.double().mean()))


def perplexities(log_probs: Tensor, parts: int) -> list[tuple[int, int, float]]:
    """Return (first, end, perplexity) of up to `parts` runs of positions of about equal length, in order."""
    sections = torch.arange(len(log_probs)).tensor_split(min(parts, len(log_probs)))
    return [(int(each[0]), int(each[-1]) + 1, perplexity(log_probs[each])) for each in sections]


def top1_agreement(reference: TextScores, other: TextScores) -> float:
    """Return the share of positions at which both find the same token likeliest, given the same tokens before."""
    return float((reference.choices == other.choices).double().mean())


def mean_divergence(other: TextScores) -> float | None:
    """Return the mean KL divergence from the reference in nats; None if there was none. Rounding may make it 0."""
    return None if other.divergences is None else max(float(other.divergences.double().mean()), 0.0)


class Recomputed:
    """Predicts each token from the `window` tokens before it, which a runner runs anew.

    Of the runner's cache, only what equals the window's own beginning is used again. It needs room for the window.
    """

    def __init__(self, runner: Runner, window: int) -> None:
        assert window > 0, f"a window of {window} tokens"
        self._runner, self._window = runner, window

    @property
    def model(self) -> Model:
        return self._runner.model

    def prefill(self, sequence: TokenSequence) -> Generator[Prefilled]:
        """Read nothing ahead: each token reads its window. Yields that the sequence is read."""
        yield Prefilled(len(sequence), len(sequence))

    def rows(self, sequence: TokenSequence) -> Tensor:
        """Return the hidden row `[1, hidden]` of the sequence's last token, in its window."""
        return self._runner.rows(TokenSequence(sequence.tokens[-self._window :]))


def continue_greedily(
    predictor: Predictor, ids: Sequence[int], count: int
) -> Generator[Prefilled, None, tuple[int, ...]]:
    """Read a text `ids` and return the `count` tokens that are likeliest after it, one after the other.

    Yields the progress of reading.
    """
    sequence, found = TokenSequence(ids), []
    yield from predictor.prefill(sequence)
    for _ in range(count):
        found.append(int(predictor.model.logits(predictor.rows(sequence))[0].argmax()))
        sequence.extend(found[-1:])
    return tuple(found)
