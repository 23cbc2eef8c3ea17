"""Penalties against transformers and slow references, and their rows in a draft against plain decoding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from offload.settings.config import Sampling
from offload.speculation.sampling.penalties import LARGEST_DRY, Penalties, dry_penalties
from offload.speculation.sampling.warp import Sampler
from tests.support.table_models import chi_square_p, counted, hierarchy, penalised_joint

CPU = torch.device("cpu")
TEXTS = st.lists(st.integers(0, 5), max_size=30)
SIZE = 12  # of the vocabulary in most tests
RUNS, SIGNIFICANCE = 500, 1e-3  # enough to detect a sampler that ignores the draft


def logits(rows=1, seed=0, vocab=SIZE):
    return 3 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def penalised(scores, sampling, prompt=(), generated=(), draft=(), breakers=()):
    penalties = Penalties(sampling, scores.shape[1], CPU, breakers)
    penalties.observe(prompt, generated=False)
    penalties.observe(generated)
    return penalties.apply(scores, [draft[: max(len(draft) - behind, 0)] for behind in reversed(range(len(scores)))])


def slow_dry(tokens, sampling, breakers):
    """DRY as it is defined: compare the end of the text with the text before every earlier position."""
    tokens = tokens[-sampling.dry_range :] if sampling.dry_range else tokens
    penalties = {}
    for end in range(len(tokens) - 1):
        n = 0
        while n <= end and tokens[end - n] == tokens[-1 - n] and tokens[end - n] not in breakers:
            n += 1
        following = tokens[end + 1]
        if n >= sampling.dry_allowed_length and following not in breakers:
            penalty = min(sampling.dry_multiplier * sampling.dry_base ** (n - sampling.dry_allowed_length), LARGEST_DRY)
            penalties[following] = max(penalty, penalties.get(following, 0))
    return penalties


DRY = st.builds(
    Sampling,
    dry_multiplier=st.sampled_from([0.3, 0.8, 5.0]),
    dry_base=st.sampled_from([1.0, 1.1, 1.75, 10.0]),
    dry_allowed_length=st.integers(1, 4),
    dry_range=st.sampled_from([0, 1, 5, 12]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEXTS, DRY, st.sets(st.integers(0, 5), max_size=2))
def test_dry_equals_a_slow_reference(text, sampling, breakers):
    is_breaker = np.isin(np.arange(SIZE), list(breakers))
    ids, penalties = dry_penalties(np.array(text, dtype=np.int64), sampling, is_breaker)
    expected = slow_dry(text, sampling, breakers)
    assert dict(zip(ids.tolist(), penalties.tolist(), strict=True)) == pytest.approx(expected)
    scores = logits()
    found = penalised(scores, sampling, text, breakers=breakers)[0]
    subtracted = torch.zeros(SIZE)
    for token, penalty in expected.items():
        subtracted[token] = penalty
    torch.testing.assert_close(found, scores[0] - subtracted)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(TEXTS.filter(bool), st.integers(1, 5))
def test_the_ngram_ban_equals_that_of_transformers(text, size):
    scores = logits()
    expected = NoRepeatNGramLogitsProcessor(size)(torch.tensor([text]), scores.clone())
    assert torch.equal(penalised(scores, Sampling(no_repeat_ngram=size), text), expected)


def test_a_ban_of_every_token_is_ignored():
    scores = logits(vocab=3)
    assert torch.equal(penalised(scores, Sampling(no_repeat_ngram=1), [0, 1, 2]), scores)
    partly = penalised(scores, Sampling(no_repeat_ngram=1), [0, 1])
    assert torch.equal(partly.isinf(), torch.tensor([[True, True, False]]))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(TEXTS, TEXTS, st.sampled_from([-2.0, 0.0, 0.7]), st.sampled_from([-1.0, 0.0, 1.5]))
def test_frequency_and_presence_count_generated_tokens(prompt, generated, frequency, presence):
    scores = logits()
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence)
    expected = scores.clone()
    for token in range(SIZE):
        count = generated.count(token)
        expected[0, token] -= count * frequency + (count > 0) * presence
    torch.testing.assert_close(penalised(scores, sampling, prompt, generated), expected)


ANY = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_allowed_length=st.integers(1, 3),
    dry_range=st.sampled_from([0, 6]),
    no_repeat_ngram=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ANY, TEXTS, TEXTS, st.lists(st.integers(0, 5), max_size=8), st.integers(1, 9))
def test_every_row_of_a_draft_has_the_distribution_of_plain_decoding(sampling, prompt, generated, draft, rows):
    def sampler(more):
        new = Sampler(sampling, 0, SIZE, CPU, breakers=[5])
        new.observe_prompt(prompt)
        for token in [*generated, *more]:
            new.observe([token])
        return new

    rows = min(rows, len(draft) + 1)
    scores, tried = logits(rows), sampler([])
    found = tried.distribution(scores, draft)
    for row in range(rows):
        plain = sampler(draft[: len(draft) - (rows - 1 - row)]).distribution(scores[row : row + 1])
        assert torch.equal(found[row : row + 1], plain)
    assert torch.equal(tried.distribution(scores[:1]), sampler([]).distribution(scores[:1]))  # the draft left no trace


PENALISED = Sampling(
    temperature=1,
    top_p=1,
    repetition_penalty=1.2,
    frequency_penalty=0.5,
    presence_penalty=0.4,
    dry_multiplier=0.8,
    dry_allowed_length=1,
    no_repeat_ngram=3,
)
METHODS = [
    ("lookup", "lookup"),
    ("retrieval", "none"),
    ("naive", "good"),
    ("triforce", "uniform"),
    ("streaming", "lookup"),
    ("auto", "good"),
]


@pytest.mark.daily("auto-good")
@pytest.mark.parametrize(("method", "draft"), METHODS)
def test_the_first_tokens_are_distributed_as_in_plain_decoding(method, draft):
    gammas = (None, None) if method == "auto" else (2, 3)
    top = hierarchy(method, draft, PENALISED, gammas, penalised=True).top
    expected = penalised_joint(PENALISED)
    assert chi_square_p(counted(top, RUNS), expected) > SIGNIFICANCE
