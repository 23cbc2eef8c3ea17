"""The contract of `KVCache` (offload/caches/protocol.py), for every cache on every store that it may use."""

from importlib import import_module
from inspect import isabstract, isclass
from pkgutil import iter_modules

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload.caches
from offload.caches import chunk_table
from tests.support.caches import CACHES, new_subject
from tests.support.retrieval import attend_table_by_torch
from tests.support.stores import projected, tiny_shape

IN_BF16 = ["full on plain", "full on blocks", "recent chunks of plain", "block table of recent chunks", "StreamingLLM"]
IN_BF16 += ["full on native packed tiered planes 1 resident", "plane of everything"]


@pytest.fixture(params=[*CACHES, *(f"{name} bf16" for name in IN_BF16)])
def new(request):
    """Return a function that makes a fresh cache of this kind."""
    name = request.param.removesuffix(" bf16")
    return lambda: new_subject(name, torch.float32 if name == request.param else torch.bfloat16)


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    """Let torch attend where Triton's kernel would."""
    monkeypatch.setattr(chunk_table, "attend_table", attend_table_by_torch)


@pytest.fixture
def subject(new):
    return new()


def tokens(count, seed=1):
    return [(position * (2 * seed + 1) + 17 * seed) % 251 for position in range(count)]


def test_attention_equals_its_definition_in_passes_of_any_size(subject):
    for count in subject.passes:
        expected = subject.expected(tokens(count))
        assert subject.is_close(subject.run(tokens(count)), expected)


def test_tokens_are_committed_by_commit_and_not_before(subject):
    before = len(subject.ids)
    assert subject.cache.length == before
    subject.cache.begin(4)
    assert subject.cache.length == before
    for layer in range(tiny_shape().layers):
        subject.cache.attend(layer, *projected(tokens(4), layer, subject.dtype))
        assert subject.cache.length == before
    subject.cache.commit()
    assert subject.cache.length == before + 4


def test_an_aborted_pass_leaves_the_committed_length_and_the_next_one_starts_over(subject):
    subject.run(tokens(5))
    for layers in (1, 2, 3):
        subject.attend(tokens(9, seed=2), layers)
        assert subject.cache.length == len(subject.ids)
        expected = subject.expected(tokens(6, seed=3))
        assert subject.is_close(subject.run(tokens(6, seed=3)), expected)
        assert subject.cache.length == len(subject.ids)


def test_truncate_returns_the_length_that_is_left(subject):
    subject.run(tokens(8))
    for length in (subject.fixed + 5, subject.fixed + 5, subject.fixed + 2):
        assert subject.truncate(length) == subject.cache.length == length


def test_truncate_and_other_tokens_equal_never_having_run_the_first(subject, new):
    other = new()
    for each in (subject, other):
        each.run(tokens(4))
    subject.run(tokens(7, seed=2))
    subject.truncate(len(other.ids))
    for count in (2, 1, 6):
        assert subject.is_close(subject.run(tokens(count, seed=3)), other.run(tokens(count, seed=3)).double())


def test_a_rollback_to_any_border_leaves_no_trace(subject):
    """To the borders of pages, chunks, blocks, sink and window, and to one token before and behind them."""
    for count in subject.passes:
        subject.run(tokens(count))
    while (length := subject.border_below(len(subject.ids))) is not None:
        subject.truncate(length)
        new = tokens(min(2, getattr(subject.cache, "room", 2)), seed=3)  # an approximate cache may select in between
        expected = subject.expected(new)
        assert subject.is_close(subject.run(new), expected), length
        subject.truncate(min(length, len(subject.ids)))


def test_truncating_to_more_than_is_committed_or_less_than_nothing_asserts(subject):
    for length in (subject.cache.length + 1, -1):
        before = subject.cache.length
        with pytest.raises(AssertionError, match="cannot truncate"):
            subject.cache.truncate(length)
        assert subject.cache.length == before


def test_begin_beyond_the_capacity_asserts_and_leaves_the_cache_as_it_was(subject):
    subject.run(tokens(2))
    with pytest.raises(AssertionError, match=subject.refusal):
        subject.cache.begin(subject.too_many)
    assert subject.cache.length == len(subject.ids)
    expected = subject.expected(tokens(3))
    assert subject.is_close(subject.run(tokens(3)), expected)


COUNTS = st.integers(1, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), COUNTS),
        st.tuples(st.just("abort"), COUNTS),
        st.tuples(st.just("truncate"), st.integers(0, 20)),
    ),
    max_size=8,
)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_after_any_history_attention_is_over_the_committed_sequence(new, steps):
    subject = new()
    for seed, (kind, count) in enumerate(steps):
        if kind == "truncate":
            subject.truncate(max(len(subject.ids) - count, subject.fixed))
        elif len(subject.ids) - subject.fixed < 20:
            if kind == "run":
                subject.run(tokens(count, seed))
            else:
                subject.attend(tokens(count, seed), layers=1 + seed % 3)
        assert subject.cache.length == len(subject.ids)
    expected = subject.expected(tokens(2, seed=9))
    assert subject.is_close(subject.run(tokens(2, seed=9)), expected)


def test_every_cache_is_among_the_subjects():
    modules = [import_module(f"offload.caches.{found.name}") for found in iter_modules(offload.caches.__path__)]
    classes = {cls for module in modules for cls in vars(module).values() if isclass(cls) and hasattr(cls, "truncate")}
    caches = {cls for cls in classes if hasattr(cls, "hold") and not isabstract(cls) and not is_protocol(cls)}
    subjects = [*(new_subject(name) for name in CACHES), *(new_subject(name, torch.bfloat16) for name in IN_BF16)]
    assert caches == {type(each.cache) for each in subjects}


def is_protocol(cls):
    return getattr(cls, "_is_protocol", False)
