"""Speculation is lossless: its output is distributed as plain decoding's, whatever the drafters propose."""

import itertools

import pytest
import torch

from offload.settings.config import Sampling
from offload.speculation.drafters.drafter import Draft
from offload.speculation.trees import verification
from tests.support.table_models import DRAFTS, hierarchy, p_value

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


@pytest.mark.daily("triforce-lookup-*", "auto-one-hot-*")
@pytest.mark.parametrize(("method", "draft", "gammas", "sampling", "runs"), CASES)
def test_the_first_three_tokens_are_distributed_as_in_plain_decoding(method, draft, gammas, sampling, runs):
    top = hierarchy(method, draft, SAMPLINGS[sampling], gammas).top
    assert p_value(top, SAMPLINGS[sampling], runs) > SIGNIFICANCE


@pytest.mark.daily("naive")
@pytest.mark.parametrize("method", ["naive", "triforce"])
def test_sampling_from_the_verifier_instead_of_the_residual_is_detected(method, monkeypatch):
    """The reference implementation's mistake."""
    monkeypatch.setattr(verification, "residual", lambda row, *rest: row)
    sampling = SAMPLINGS["t1"]
    assert p_value(hierarchy(method, "uniform", sampling, gammas=(3, 4)).top, sampling, RUNS) < SIGNIFICANCE


def test_the_example_of_the_reference_defect():
    """p = p_hat = (.5, .5), q = (1, 0): the residual is (0, 1), and half of the tokens must be 1."""
    q, p = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    first = [0 if verification.verify(Draft([0], q), p, generator)[0] else 1 for _ in range(4000)]
    assert abs(sum(first) / 4000 - 0.5) < 0.04
    rejected = {verification.verify(Draft([0], q), p, generator) for _ in range(200)}
    assert rejected == {(1, 0), (0, 1)}
