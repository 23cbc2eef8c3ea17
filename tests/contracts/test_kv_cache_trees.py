"""The contract of `KVCache` for trees in flight, for every cache and one store of each class."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.memory.tree_attention import tree_of
from tests.support.caches import new_subject
from tests.support.stores import SOME_STORES

CACHES = [
    *(f"full on {store}" for store in SOME_STORES),
    *("recent chunks of plain", "recent chunks of native tiered hybrid 1 resident", "block table of recent chunks"),
    *("StreamingLLM", "full on blocks bf16", "block table of recent chunks bf16", "plane of everything bf16"),
]
TREES = {
    "a chain": (-1, 0, 1, 2),
    "siblings only": (-1, -1, -1),
    "in order of depth": (-1, -1, 0, 0, 1, 2, 2, 4),
    "a chain before it": (-1, 0, 1, 1, 2, 2, 3, 4, 7),
    "branch after branch": (-1, 0, 1, -1, 3, 3, 5, -1),
}


@pytest.fixture(params=CACHES)
def new(request):
    """Return a function that makes a fresh cache of this kind."""
    name = request.param.removesuffix(" bf16")
    return lambda: new_subject(name, torch.float32 if name == request.param else torch.bfloat16)


@pytest.fixture
def subject(new):
    subject = new()
    subject.run(tokens(5))
    return subject


def tokens(count, seed=1):
    return [(position * (2 * seed + 1) + 17 * seed) % 251 for position in range(count)]


def path_to(parents, node):
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def is_expected(subject, ids, parents, found, first=0):
    """Return whether each row is that of the chain which the path to its token is."""
    for node in range(first, len(ids)):
        path = path_to(parents, node)
        expected = subject.expected([ids[index] for index in path])[:, -1]
        if not subject.is_close(found[:, node - first], expected):
            return False
    return True


def test_each_token_attends_to_its_ancestors_and_to_all_that_is_committed(subject):
    for parents in TREES.values():
        ids = tokens(len(parents), seed=3)
        assert is_expected(subject, ids, parents, subject.grow(ids, parents))


@pytest.mark.parametrize("node", [0, -1])
def test_the_path_that_is_kept_equals_having_run_it_as_a_chain(subject, node):
    for parents in TREES.values():
        ids = tokens(len(parents), seed=3)
        subject.grow(ids, parents)
        subject.keep(ids, path_to(parents, node % len(parents)))
        assert subject.cache.length == len(subject.ids)
        expected = subject.expected(tokens(2, seed=4))
        assert subject.is_close(subject.run(tokens(2, seed=4)), expected)


def test_a_tree_may_grow_pass_by_pass(subject):
    parents, ids = TREES["in order of depth"], tokens(8, seed=3)
    for first, end in ((0, 2), (2, 5), (5, 7), (7, 8)):
        found = subject.grow(ids[first:end], parents[:end])
        assert subject.cache.held == end
        assert is_expected(subject, ids[:end], parents, found, first)
    subject.keep(ids, [1, 4, 7])
    expected = subject.expected(tokens(3))
    assert subject.is_close(subject.run(tokens(3)), expected)


def test_a_new_tree_replaces_the_one_in_flight(subject):
    subject.grow(tokens(3, seed=3), (-1, -1, 0))
    ids = tokens(4, seed=5)
    assert is_expected(subject, ids, (-1, 0, 0, -1), subject.grow(ids, (-1, 0, 0, -1)))
    subject.keep(ids, [0, 2])
    expected = subject.expected(tokens(2))
    assert subject.is_close(subject.run(tokens(2)), expected)


@pytest.mark.parametrize("layers", [0, 2])
def test_an_aborted_pass_leaves_the_tree_of_those_before(subject, layers):
    ids = tokens(3, seed=3)
    subject.grow(ids, (-1, -1, 0))
    subject.attend(tokens(2, seed=6), layers, tree_of((-1, -1, 0, 2, 1)))
    assert subject.cache.held == 3
    subject.keep(ids, [0, 2])
    expected = subject.expected(tokens(2))
    assert subject.is_close(subject.run(tokens(2)), expected)


def test_what_is_no_path_is_refused(subject):
    subject.grow(tokens(4, seed=3), (-1, -1, 0, 1))
    for keep in ([0, 1], [2], [1, 2], [0, 2, 3]):
        with pytest.raises(AssertionError, match="a path"):
            subject.cache.commit(keep)


def test_a_tree_beyond_the_capacity_asserts(subject):
    tree = tree_of((-1,) * subject.too_many)
    with pytest.raises(AssertionError, match=subject.refusal):
        subject.cache.begin(len(tree), tree)
    expected = subject.expected(tokens(2))
    assert subject.is_close(subject.run(tokens(2)), expected)


@pytest.mark.parametrize("store", SOME_STORES)
@pytest.mark.parametrize(("before", "ends"), [(37, [70]), (64, [40, 60, 70]), (5, [20, 45, 70])])
def test_a_tree_may_have_more_tokens_than_a_page(store, before, ends):
    """Also where it grows beyond the two pages that a small one may be in."""
    subject = new_subject(f"full on {store}")
    subject.run(tokens(before))
    ids, parents = tokens(70, seed=3), random_tree(70, seed=1)
    for first, end in zip((0, *ends), ends, strict=False):
        found = subject.grow(ids[first:end], parents[:end])
        assert is_expected(subject, ids[:end], parents[:end], found, first)
    subject.keep(ids, path_to(parents, 69))
    expected = subject.expected(tokens(2))
    assert subject.is_close(subject.run(tokens(2)), expected)


def random_tree(count, seed):
    draw = random.Random(seed)
    return tuple(draw.randrange(-1, index) for index in range(count))


STEPS = st.lists(
    st.tuples(st.sampled_from(["run", "tree", "grown tree", "abort", "truncate"]), st.integers(1, 9)), max_size=6
)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_after_any_history_attention_is_over_the_committed_sequence(new, steps):
    subject = new()
    for seed, (kind, count) in enumerate(steps):
        ids, parents = tokens(count, seed), random_tree(count, seed)
        if kind == "truncate":
            subject.truncate(max(len(subject.ids) - count, subject.fixed))
        elif len(subject.ids) - subject.fixed > 20:
            continue
        elif kind == "run":
            subject.run(ids)
        elif kind == "abort":
            subject.attend(ids, seed % 4, tree_of(parents))
        else:
            first = count if kind == "tree" else (count + 1) // 2
            subject.grow(ids[:first], parents[:first])
            if first < count:
                assert is_expected(subject, ids, parents, subject.grow(ids[first:], parents), first)
            subject.keep(ids, path_to(parents, seed % count))
        assert subject.cache.length == len(subject.ids)
    expected = subject.expected(tokens(2, seed=9))
    assert subject.is_close(subject.run(tokens(2, seed=9)), expected)
    subject.truncate(subject.fixed)
    subject.cache.begin(sum(subject.passes) if subject.fixed else subject.too_many - 1)  # no slot has leaked


# Planted faults, which these tests must find
