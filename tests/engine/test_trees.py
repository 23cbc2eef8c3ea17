"""Methods that draft trees emit plain decoding's tokens, and those of the target's distribution."""

import pytest

from offload import Sampling
from offload.errors import SettingsError
from tests.support.engine import fresh, run, tokens
from tests.support.models import ids

T06 = Sampling(temperature=0.6, top_p=0.9, coupled=True)
T1 = Sampling(temperature=1, top_p=1, coupled=True)
PENALISED = Sampling(temperature=1, top_k=40, repetition_penalty=1.3, dry_multiplier=0.8, coupled=True)
CASES = [
    ("naive", "model", "k-ary:3x2x1", "without-replacement"),
    ("naive", "model", "40", "with-replacement"),
    ("lookup", "lookup", "8", "without-replacement"),
    ("retrieval", "none", "12", "top-k"),
    ("streaming", "none", "k-ary:2x1x1x1", "without-replacement"),
    ("triforce", "model", "9", "with-replacement"),
    ("triforce", "lookup", "k-ary:2x2x2", "without-replacement"),
    ("naive", "model", "auto", "top-k"),
    ("auto", "lookup", "auto", "without-replacement"),
    ("auto", "model", "12", "with-replacement"),
    ("retrieval", "none", "auto", "without-replacement"),
]


@pytest.fixture(scope="module")
def coupled_texts(endless_engine):
    """Return plain decoding's tokens by sampling."""
    return {
        each: tokens(run(fresh(endless_engine), ids(60), 30, sampling=each, seed=3)) for each in (T06, T1, PENALISED)
    }


@pytest.mark.parametrize(("method", "draft", "tree", "sampling"), CASES)
def test_greedy_is_plain_greedy(endless_engine, method, draft, tree, sampling):
    """The second request goes on with the caches of the first."""
    engine, prompt = fresh(endless_engine), ids(60)
    expected = tokens(run(fresh(endless_engine), prompt, 40))
    for end in (20, 40):
        found = tokens(run(engine, prompt, end, method, draft, tree=tree, tree_sampling=sampling))
        assert found == expected[:end]


COUPLED = [
    ("naive", "model", "k-ary:3x2", T1),
    ("naive", "model", "9", PENALISED),
    ("lookup", "lookup", "8", T06),
    ("retrieval", "none", "k-ary:2x2x1", T06),
    ("streaming", "none", "9", T1),
    ("triforce", "lookup", "8", T1),
    ("triforce", "model", "12", T06),
]


@pytest.mark.parametrize(("method", "draft", "tree", "sampling"), COUPLED)
def test_coupled_sampling_is_plain_coupled_sampling(endless_engine, coupled_texts, method, draft, tree, sampling):
    """Interrupted once: the second request goes on with the caches of the first."""
    engine, prompt = fresh(endless_engine), ids(60)
    for end in (12, 30):
        found = tokens(run(engine, prompt, end, method, draft, tree=tree, sampling=sampling, seed=3))
        assert found == coupled_texts[sampling][:end]


def test_a_tree_larger_than_what_is_left_of_the_context_is_drafted(endless_engine):
    engine, prompt = fresh(endless_engine), ids(60)
    expected = tokens(run(fresh(endless_engine), prompt, 4))
    assert tokens(run(engine, prompt, 4, "naive", "model", tree="100")) == expected


@pytest.mark.parametrize("tree", ["k-ary:300", "k-ary:1x268x1"])
def test_a_tree_wider_than_the_vocabulary_is_refused(endless_engine, tree):
    with pytest.raises(SettingsError, match=f"tree is '{tree}', with up to .* children") as caught:
        run(endless_engine, ids(60), 5, "naive", "model", tree=tree)
    assert "k-ary:267" in caught.value.hint


def test_a_tree_as_wide_as_the_vocabulary_is_exact(endless_engine):
    expected = tokens(run(fresh(endless_engine), ids(60), 6))
    assert tokens(run(fresh(endless_engine), ids(60), 6, "naive", "model", tree="k-ary:267")) == expected
