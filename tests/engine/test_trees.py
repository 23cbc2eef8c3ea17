"""Methods that draft trees emit plain decoding's tokens, and those of the target's distribution."""

import pytest

from offload import Sampling
from tests.support.engine import fresh, run, tokens
from tests.support.models import ids
from tests.support.table_models import hierarchy, p_value

CASES = [
    ("naive", "model", "k-ary:3x2x1", "without-replacement"),
    ("naive", "model", "40", "with-replacement"),
    ("lookup", "lookup", "8", "without-replacement"),
    ("retrieval", "none", "12", "top-k"),
    ("streaming", "none", "k-ary:2x1x1x1", "without-replacement"),
    ("triforce", "model", "9", "with-replacement"),
    ("triforce", "lookup", "k-ary:2x2x2", "without-replacement"),
]


@pytest.mark.parametrize(("method", "draft", "tree", "sampling"), CASES)
def test_greedy_is_plain_greedy(endless_engine, method, draft, tree, sampling):
    """The second request goes on with the caches of the first."""
    engine, prompt = fresh(endless_engine), ids(60)
    expected = tokens(run(fresh(endless_engine), prompt, 40))
    for end in (20, 40):
        found = tokens(run(engine, prompt, end, method, draft, tree=tree, tree_sampling=sampling))
        assert found == expected[:end]


@pytest.mark.parametrize(("method", "draft", "tree"), [("naive", "model", "k-ary:3x2"), ("triforce", "lookup", "8")])
def test_coupled_sampling_is_plain_coupled_sampling(endless_engine, method, draft, tree):
    prompt, sampling = ids(60), Sampling(temperature=1, coupled=True)
    expected = tokens(run(fresh(endless_engine), prompt, 24, sampling=sampling, seed=3))
    found = run(fresh(endless_engine), prompt, 24, method, draft, tree=tree, sampling=sampling, seed=3)
    assert tokens(found) == expected


def test_a_tree_larger_than_what_is_left_of_the_context_is_drafted(endless_engine):
    engine, prompt = fresh(endless_engine), ids(60)
    expected = tokens(run(fresh(endless_engine), prompt, 4))
    assert tokens(run(engine, prompt, 4, "naive", "model", tree="100")) == expected


@pytest.mark.parametrize(
    ("method", "draft", "sampling"),
    [("naive", "good", "with-replacement"), ("triforce", "uniform", "without-replacement")],
)
def test_the_first_tokens_are_distributed_as_in_plain_decoding(method, draft, sampling):
    t1 = Sampling(temperature=1, top_p=1)
    level = hierarchy(method, draft, t1, tree="k-ary:2x2", tree_sampling=sampling).top
    assert p_value(level, t1, 2_000) > 1e-3
