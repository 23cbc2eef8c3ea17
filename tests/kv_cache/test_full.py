"""The full cache: however tokens come in and are taken back, attention is that over the sequence as it stands."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.architecture.config import shape_from_config
from offload.architecture.rope import Rope
from offload.kv_cache.full import FullCache
from offload.kv_cache.store import PlainStore
from tests.support.models import make_hf_model

CPU = torch.device("cpu")
SHAPE = shape_from_config(make_hf_model("llama").config, {})
CAPACITY = 64


def rows(ids):
    """q, k and v of some tokens, the same for the same token."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(256, SHAPE.heads + 2 * SHAPE.kv_heads, SHAPE.head_dim, generator=generator)
    return table[torch.tensor(ids)].split((SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads), dim=1)


def run(cache, ids, commit=True):
    """One pass over all layers; every layer gets the tokens in an order of its own."""
    cache.begin(len(ids))
    out = [cache.attend(layer, *rows([(i + layer) % 256 for i in ids])) for layer in range(SHAPE.layers)]
    if commit:
        cache.commit()
    return torch.stack(out)


def new():
    store = PlainStore(SHAPE, CAPACITY, torch.float32, CPU)
    return FullCache(store, Rope(SHAPE, CAPACITY, torch.float32, CPU), CAPACITY)


def test_in_pieces_is_as_in_one():
    ids = list(range(40))
    whole, cache = run(new(), ids), new()
    pieces = [run(cache, ids[a:b]) for a, b in ((0, 1), (1, 17), (17, 18), (18, 40))]
    assert (torch.cat(pieces, dim=1) - whole).abs().max() < 1e-5


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.lists(st.integers(0, 255), min_size=1, max_size=12)),
        st.tuples(st.just("abandon"), st.lists(st.integers(0, 255), min_size=1, max_size=12)),
        st.tuples(st.just("truncate"), st.integers(0, CAPACITY)),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(STEPS)
def test_any_history_equals_a_fresh_cache(steps):
    cache, sequence = new(), []
    for kind, value in steps:
        if kind == "truncate":
            sequence = sequence[:value]
            cache.truncate(len(sequence))
        elif len(sequence) + len(value) < CAPACITY:
            run(cache, value, commit=kind == "run")
            sequence += value if kind == "run" else []
        assert cache.length == len(sequence)
    fresh = new()
    if sequence:
        run(fresh, sequence)
    assert (run(cache, [7]) - run(fresh, [7])).abs().max() < 1e-5


def test_an_exception_in_a_pass_leaves_the_cache_as_it_was():
    cache = new()
    run(cache, [1, 2, 3])
    cache.begin(2)
    cache.attend(0, *rows([4, 5]))
    assert cache.length == 3  # abandoned here: no commit
    assert (run(cache, [6]) - run_after([1, 2, 3], [6])).abs().max() < 1e-5


def run_after(before, ids):
    cache = new()
    run(cache, before)
    return run(cache, ids)


def test_contracts_are_kept():
    cache = new()
    with pytest.raises(AssertionError, match="65 tokens in a cache of 64"):
        cache.begin(CAPACITY + 1)
    with pytest.raises(AssertionError, match="cannot truncate"):
        cache.truncate(1)
