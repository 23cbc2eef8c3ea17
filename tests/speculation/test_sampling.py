"""The distribution against transformers' logits processors, and draws against the distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload.errors import SettingsError, TriforceError
from offload.settings.config import Sampling
from offload.speculation.sampling.penalties import repetition_penalty
from offload.speculation.sampling.warp import Sampler, draw, filtered_at_once, sample, warp
from offload.speculation.trees.tree import Draft
from offload.speculation.trees.verification import verify

CPU = torch.device("cpu")
VOCAB = 50


def logits(rows=3, seed=0, scale=3.0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def distribution(scores, sampling, seen):
    return warp(torch.where(seen, repetition_penalty(scores, sampling.repetition_penalty), scores), sampling)


def transformers_distribution(scores, sampling, context):
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(context.expand(len(scores), -1), scores.clone()).softmax(-1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.builds(
        Sampling,
        temperature=st.floats(0.1, 3),
        top_p=st.floats(0.05, 1),
        top_k=st.integers(0, VOCAB + 5),
        min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    ),
    st.integers(0, 1000),
)
def test_the_distribution_equals_that_of_transformers(sampling, seed):
    scores, context = logits(seed=seed), torch.tensor([[1, 4, 4, 9, 30]])
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[context[0]] = True
    found, expected = distribution(scores, sampling, seen), transformers_distribution(scores, sampling, context)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-38},
        {"temperature": 1e-5},
        {"temperature": 1e6},
        {"top_p": 1e-38},
        {"top_p": 1 - 1e-12},
        {"top_k": 2**31 - 1},
        {"min_p": 1e-38},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
    ],
)
def test_every_accepted_setting_gives_a_distribution(extreme):
    seen = torch.ones(VOCAB, dtype=torch.bool)
    for scores in (logits(), logits(scale=1e30), torch.zeros(2, VOCAB)):
        scores[:, -1] = float("-inf")
        found = distribution(scores, Sampling(**({"temperature": 1.0, "top_p": 1.0} | extreme)), seen)
        assert torch.isfinite(found).all()
        assert torch.allclose(found.sum(-1), torch.ones(len(scores)))
        assert found[:, -1].sum() == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(1e-6, 1 - 1e-6), st.integers(0, 999), st.sampled_from([1, 7, 50, 3000]), st.sampled_from([0.01, 1, 8]))
def test_top_p_keeps_the_fewest_tokens_whose_probabilities_sum_to_p(p, seed, vocab, scale):
    """In fp64, up to the rounding of fp32 probabilities: in a long tail it may move the border by several tokens."""
    draw = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    scores = draw.bfloat16().float()  # many equal logits: which of them are kept is open, how many is not
    found = warp(scores, Sampling(temperature=1, top_p=p))
    ordered = scores.double().softmax(-1).sort(descending=True).values
    kept = (found > 0).sum(-1, keepdim=True)
    mass = ordered.cumsum(-1).gather(1, kept - 1)
    assert (mass > p - 1e-6).all() and (mass - ordered.gather(1, kept - 1) < p + 1e-6).all()
    assert torch.allclose(
        found.sort(descending=True).values.double(), ordered.where(torch.arange(vocab) < kept, 0.0) / mass, atol=1e-5
    )
    assert torch.equal(warp(scores[1:2], Sampling(temperature=1, top_p=p))[0], found[1])


EVERY_STEP = [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}]


@pytest.mark.parametrize("settings", [{"temperature": 0}, *EVERY_STEP])
def test_logits_that_are_not_finite_are_an_error_before_a_token_is_used(settings):
    generator, draft = torch.Generator(), Draft([0, 0], None)
    for bad in ([float("nan")], [float("inf")], [float("nan"), float("-inf")], [float("-inf")] * VOCAB):
        scores = logits()
        scores[1, : len(bad)] = torch.tensor(bad)
        sampling = Sampling(**({"temperature": 1, "top_p": 1} | settings))
        found = warp(scores, sampling)
        if settings != {"temperature": 0}:  # as a GPU computes them
            torch.testing.assert_close(filtered_at_once(scores - scores.amax(1, True), sampling), found, equal_nan=True)
        assert found.isnan().all(-1).tolist() == [False, True, False]
        with pytest.raises(TriforceError, match="no numbers"):
            sample(found[1], generator)
        with pytest.raises(TriforceError, match="no numbers"):
            verify(draft, found, generator)  # even if the first token is rejected
        sample(found[0], generator)


def test_draws_follow_the_distribution():
    from math import sqrt

    probs = warp(logits(rows=1, scale=1.5), Sampling(temperature=1, top_k=6))[0]
    generator, runs = torch.Generator().manual_seed(0), 5_000
    counts = torch.zeros(VOCAB)
    for _ in range(runs):
        counts[sample(probs, generator)] += 1
    kept = probs > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - runs * probs)[kept] ** 2 / (runs * probs[kept])).sum()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * sqrt(2 * freedom) + 8  # p far below 0.001


def drawn(sampler, scores):
    return sample(sampler.distribution(scores.unsqueeze(0))[0], sampler.generator)


def test_the_seed_determines_the_draws():
    def thirty(seed):
        sampler = Sampler(Sampling(temperature=1), seed, VOCAB, CPU)
        return [drawn(sampler, row) for row in logits(rows=30)]

    assert thirty(1) == thirty(1)
    assert thirty(1) != thirty(2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2**31},
        {"min_p": 2},
        {"temperature": 1e38},
        {"temperature": float("inf")},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e38},
        {"repetition_penalty": float("nan")},
        {"frequency_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"dry_multiplier": -1},
        {"dry_multiplier": 101},
        {"dry_base": 0.5},
        {"dry_base": float("inf")},
        {"dry_allowed_length": 0},
        {"dry_range": -1},
        {"no_repeat_ngram": -1},
    ],
)
def test_impossible_settings_are_refused_with_a_hint(wrong):
    name = next(iter(wrong)).replace("_", "-")
    with pytest.raises(SettingsError, match=f"{name} is ") as caught:
        Sampling(**wrong)
    assert "use " in caught.value.hint


@pytest.mark.parametrize("wrong", [{"top_k": 50.5}, {"temperature": "hot"}, {"top_p": 7}])
def test_a_models_impossible_defaults_are_refused(wrong):
    with pytest.raises(SettingsError, match=r"generation_config\.json"):
        Sampling.from_generation_config(wrong)


def test_no_token_of_probability_0_is_drawn():
    """Not even by the smallest and the largest random number, also of a row that is not normalised."""
    probs = torch.tensor([0, 0, 1 / 3, 0, 1e-30, 1 / 7, 0, 0])
    generator = torch.Generator().manual_seed(0)
    for number, token in ((0.0, 2), (1 - 2**-53, 5)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *_, number=number, **__: torch.tensor([number], dtype=torch.float64))
            assert draw(probs, generator).tolist() == [token]
