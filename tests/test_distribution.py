"""Lossless is the product: what comes out is distributed as plain decoding's output, whatever the drafters say."""

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from tables import DRAFTS, TARGET, VOCAB, TableRunner, hierarchy, p_value, p_value_of

from offload import speculate
from offload.config import Sampling
from offload.draft import Draft, ModelDrafter
from offload.pace import Pace
from offload.sampling import Sampler
from offload.speculate import ModelVerifier

RUNS, SURE = 20_000, 1e-3
SAMPLINGS = {"t1": Sampling(temperature=1, top_p=1), "t0.7": Sampling(temperature=0.7, top_p=0.9)}
FIXED, ADAPTIVE = (2, 4), (None, None)
METHODS = [
    ("ar", "lookup", ADAPTIVE),
    ("lookup", "lookup", FIXED),
    ("retrieval", "none", FIXED),
    ("triforce", "lookup", FIXED),
    ("streaming", "lookup", FIXED),
    ("auto", "lookup", ADAPTIVE),
    *((method, draft, FIXED) for method, draft in itertools.product(("naive", "triforce"), DRAFTS)),
    *(("auto", draft, ADAPTIVE) for draft in DRAFTS),
]
CASES = {
    f"{method}-{draft}-{name}": (method, draft, SAMPLINGS[name], gammas)
    for (method, draft, gammas), name in itertools.product(METHODS, SAMPLINGS)
}


@pytest.fixture(scope="module")
def p_values():
    """All cases, on all cores; each is a future."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield {name: pool.submit(p_value_of, *case, RUNS) for name, case in CASES.items()}


@pytest.mark.slow
@pytest.mark.xdist_group("distribution")
@pytest.mark.parametrize("name", CASES)
def test_the_first_three_tokens_are_distributed_as_plain_decoding_has_it(name, p_values):
    assert p_values[name].result() > SURE


@pytest.mark.parametrize("method", ["naive", "triforce"])
def test_sampling_the_verifier_instead_of_the_residual_is_found(method, monkeypatch):
    """The reference implementation's mistake."""
    monkeypatch.setattr(speculate, "residual", lambda row, draft, place: row)
    sampling = SAMPLINGS["t1"]
    assert p_value(hierarchy(method, "uniform", sampling, gammas=(3, 4)).top, sampling, 5_000) < SURE


def test_the_same_mistake_at_the_lower_level_alone_is_found(monkeypatch):
    """As in the reference: what the upper level is told of its draft is not how the draft was drawn."""
    sampling, right = SAMPLINGS["t1"], speculate.residual
    top, lower = hierarchy("triforce", "uniform", sampling, gammas=(3, 4)).levels
    advance, inside = lower.advance, []

    def marked(context, limit):
        inside.append(True)
        try:
            return advance(context, limit)
        finally:
            inside.pop()

    lower.advance = marked
    monkeypatch.setattr(speculate, "residual", lambda row, *rest: row if inside else right(row, *rest))
    assert p_value(top, sampling, 5_000) < SURE


class Choosy(ModelDrafter):
    """Looks at what it has drawn, and keeps unlikely tokens from being judged."""

    def propose(self, context, limit):
        draft = super().propose(context, limit)
        chances = draft.rows.gather(1, torch.tensor(draft.tokens)[:, None])[:, 0]
        kept = int((chances > 0.3).long().cumprod(0).sum())
        return Draft(draft.tokens[:kept], draft.rows[:kept])


def test_throwing_away_a_sampled_token_is_found():
    sampling = SAMPLINGS["t1"]
    sampler = Sampler(sampling, 0, VOCAB, torch.device("cpu"))
    target = ModelVerifier("full", TableRunner(TARGET), sampler)
    results = []
    for kind in (ModelDrafter, Choosy):
        pace = Pace([kind(TableRunner(DRAFTS["good"]), sampler)], gamma=3)
        results.append(p_value(speculate.speculate("target", target, pace, sampler.generator), sampling, 5_000))
    assert results[0] > SURE > results[1]


def test_the_example_of_the_reference_defect():
    """p = p_hat = (.5, .5), q = (1, 0): the residual is (0, 1), and half of the tokens must be 1."""
    q, p = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    first = [0 if speculate.verify(Draft([0], q), p, generator)[0] else 1 for _ in range(4000)]
    assert abs(sum(first) / 4000 - 0.5) < 0.04
    rejected = {speculate.verify(Draft([0], q), p, generator) for _ in range(200)}
    assert rejected == {(1, 0), (0, 1)}
