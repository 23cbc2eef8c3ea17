"""Speculation is lossless: its output is distributed as plain decoding's, whatever the drafters propose."""

import itertools

import pytest
import torch

from offload.sequence import TokenSequence
from offload.settings.config import Sampling
from offload.speculation.trees import verification
from tests.support.table_models import DRAFTS, MIDDLE, PROMPT, VOCAB, chi_square_p, hierarchy, p_value, warped

RUNS, MANY, SIGNIFICANCE = 1_500, 20_000, 1e-3  # 1,500 runs detect the mistakes below
SAMPLINGS = {"t1": Sampling(temperature=1, top_p=1), "t0.7": Sampling(temperature=0.7, top_p=0.9)}
FIXED, ADAPTIVE = (2, 3), (None, None)
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
CASES = [
    # Each run of the suite tests every method and drafter with one of the samplings; the long tests, all combinations.
    *(pytest.param(*method, list(SAMPLINGS)[index % 2], RUNS) for index, method in enumerate(METHODS)),
    *(
        pytest.param(*method, name, MANY, marks=pytest.mark.long)
        for method, name in itertools.product(METHODS, SAMPLINGS)
    ),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Run with one thread: the tensors have eight numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.daily("triforce-lookup-*")
@pytest.mark.parametrize(("method", "draft", "gammas", "sampling", "runs"), CASES)
def test_the_first_three_tokens_are_distributed_as_in_plain_decoding(method, draft, gammas, sampling, runs):
    top = hierarchy(method, draft, SAMPLINGS[sampling], gammas).top
    assert p_value(top, SAMPLINGS[sampling], runs) > SIGNIFICANCE


@pytest.mark.long
@pytest.mark.parametrize("method", ["naive", "triforce"])
def test_sampling_from_the_verifier_instead_of_the_residual_is_detected(method, monkeypatch):
    """The reference implementation's mistake."""
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    sampling = SAMPLINGS["t1"]
    assert p_value(hierarchy(method, "uniform", sampling, gammas=(3, 4)).top, sampling, RUNS) < SIGNIFICANCE


def test_sampling_p_hat_instead_of_the_residual_at_the_lower_level_is_detected(monkeypatch):
    """What the lower level passes up must be distributed as the rows p_hat that come with it, the middle's own."""
    results = []
    for residual in (verification.residual, lambda p, q: p):
        monkeypatch.setattr(verification, "residual", residual)
        lower = hierarchy("triforce", "uniform", SAMPLINGS["t1"], gammas=(3, 4)).levels[1]
        counts, sequence = torch.zeros(VOCAB, dtype=torch.long), TokenSequence()
        for _ in range(300):
            sequence.restart(PROMPT)
            draft = lower.advance(sequence, 3, True)
            counts[draft.tokens[0]] += 1
        p_hat = warped(MIDDLE, SAMPLINGS["t1"])[PROMPT[-2], PROMPT[-1]]
        assert torch.equal(draft.rows[0], p_hat)
        results.append(chi_square_p(counts, p_hat.double()))
    assert results[0] > SIGNIFICANCE > results[1]
