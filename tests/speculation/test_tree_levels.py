"""Trees through runners: rows, rollbacks and the path that is kept."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.caches.block_table import TableCache
from offload.caches.retrieval import CopiedCache
from offload.caches.streaming_llm import StreamingCache
from offload.kernels.native.ops import NativeOperations
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.speculation.trees.tree import tree_of
from tests.support.offloading import CPU, native_kernel
from tests.support.retrieval import RetrievalSetup, ids, load

SETUPS = {"copied": RetrievalSetup(CopiedCache, 4, 24, 400), "table": RetrievalSetup(TableCache, 16, 32, 400)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the model by cache: the block table needs the native kernel."""
    native = None if native_kernel() is None else NativeOperations(native_kernel())
    folder = tmp_path_factory.mktemp
    return {
        name: load(folder(name), 2, operations=operations)
        for name, operations in (("copied", None), ("table", native))
        if name == "copied" or native
    }


def random_tree(count, seed):
    draw = random.Random(seed)
    return tuple(draw.randrange(-1, index) for index in range(count))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
        st.tuples(st.just("truncate"), st.integers(1, 12)),
        st.tuples(st.just("restart"), st.lists(st.integers(0, 2), min_size=1, max_size=12)),
        st.tuples(st.just("draft"), st.lists(st.integers(0, 2), max_size=4)),
        st.tuples(st.just("tree"), st.lists(st.integers(0, 2), min_size=1, max_size=7)),
        st.tuples(st.just("abort"), st.lists(st.integers(0, 2), min_size=1, max_size=7)),
        st.tuples(st.just("settle"), st.none()),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.booleans())
def test_rows_are_those_of_a_fresh_runner_after_any_history(models, steps, streaming):
    """Few tokens: the sequence often goes on along a path of the tree."""
    model = models["copied"]
    cache = StreamingCache(model.shape, model.rope(200), 4, 96, 32, torch.float32, CPU) if streaming else None
    runner, sequence = Runner(model, cache or model.new_cache(120), chunk=4), TokenSequence([1, 2, 1])
    for seed, (what, value) in enumerate(steps):
        if what == "extend" and len(sequence) < 60:
            sequence.extend(value)
        elif what == "truncate":
            sequence.truncate(min(value, len(sequence)))
        elif what == "restart":
            sequence.restart(value)
        elif what == "settle":
            runner.settle(sequence)
        elif what == "draft":
            assert torch.allclose(runner.rows(sequence, value), fresh_rows(model, sequence, value), atol=1e-4)
        elif what == "tree":
            parents = random_tree(len(value), seed)
            found = runner.rows(sequence, value, parents)
            for node in range(-1, len(value)):
                path = [value[index] for index in tree_of(parents).path_to(node)]
                assert torch.allclose(found[node + 1], fresh_rows(model, sequence, path)[-1], atol=1e-4)
        elif what == "abort":
            with pytest.raises(KeyboardInterrupt), interrupted(model, after=seed % 3):
                runner.rows(sequence, value, random_tree(len(value), seed))
        assert runner.num_cached <= runner.cache.length
    assert torch.allclose(runner.rows(sequence), fresh_rows(model, sequence), atol=1e-4)
    assert runner.cache.length == runner.num_cached == len(sequence)


def fresh_rows(model, sequence, draft=()):
    return Runner(model, model.new_cache(120)).rows(TokenSequence(sequence.tokens), draft)


class interrupted:
    """Raise KeyboardInterrupt in a layer of a model."""

    def __init__(self, model, after):
        self._model, self._left = model, after

    def __enter__(self):
        self._layer = self._model._run_layer
        self._model._run_layer = self._run

    def _run(self, *arguments):
        self._left -= 1
        if self._left < 0 or arguments[0] == self._model.shape.layers - 1:
            raise KeyboardInterrupt
        return self._layer(*arguments)

    def __exit__(self, *_):
        self._model._run_layer = self._layer


def test_a_row_has_the_bits_of_the_chain_that_its_path_is(models):
    if "table" not in models:
        pytest.skip("there is no native kernel here")
    model, parents, draft = models["table"], random_tree(12, seed=4), ids(12, seed=5)
    full, middle, sequence = SETUPS["table"].prefilled(model, 90)
    for runner, new in ((full, SETUPS["table"].full), (middle, lambda model: middle)):
        found = runner.rows(sequence, draft, parents).clone()
        for node in range(-1, 12):
            path = [draft[index] for index in tree_of(parents).path_to(node)]
            assert torch.equal(found[node + 1], new(model).rows(TokenSequence(sequence.tokens), path)[-1])


def test_the_path_that_is_taken_is_not_run_again(models, monkeypatch):
    model = models["copied"]
    runner, sequence, ran = Runner(model, model.new_cache(80)), TokenSequence([1, 2, 3, 4]), []
    through = model.through
    monkeypatch.setattr(model, "through", lambda ids, cache: ran.append(ids.tolist()) or through(ids, cache))
    list(runner.prefill(sequence))
    runner.rows(sequence, [5, 6, 7, 8], (-1, -1, 1, 1))
    sequence.extend([6, 8, 9])
    runner.settle(sequence)
    runner.rows(sequence, [1])
    assert ran == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 1]]
