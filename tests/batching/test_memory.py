"""Pages that the sequences of a batch share."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import Prefilled
from offload.batching.batch import Failed
from offload.batching.memory import BatchMemory
from offload.engine import Engine
from offload.errors import OutOfMemory
from offload.events import Restored
from offload.memory.paged_store import PagedStore, PagePool
from tests.batching.test_batch import alone, collect, request
from tests.support.engine import ALL, fresh, tokens
from tests.support.models import ids, make_hf_model
from tests.support.offloading import make_model
from tests.support.prompt_cache import engine_on

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def native(endless_engine):
    if endless_engine.model.operations.kernel is None:
        pytest.skip("the native kernel is not built")


DOCUMENT = ids(700)


def questions(count, method=("ar", "lookup"), new=8):
    return [request(key, method, [*DOCUMENT, *ids(20 + 9 * key, key)], new) for key in range(count)]


def run_tokens(events):
    """Return how many prompt tokens have been run, in all."""
    first, last = {}, {}
    for key, event in events:
        if isinstance(event, Prefilled):
            first.setdefault(key, event.done)
            last[key] = event.done
    return {key: last[key] - first[key] for key in last}


@pytest.mark.parametrize("method", ALL)
def test_questions_about_one_document_run_it_once_and_keep_their_answers(endless_engine, method):
    requests = questions(3, method)
    events = list(fresh(endless_engine).generate_batch(requests, 2))
    run = run_tokens(events)
    assert run[0] == len(requests[0].ids) and all(run[key] <= len(requests[key].ids) - 700 + 1 for key in (1, 2))
    for wanted in requests:
        assert tokens(collect(events)[wanted.key]) == tokens(alone(endless_engine, wanted))


@pytest.mark.parametrize(("limit", "pages"), [(None, 3 * 4), (2**40, 3 * 4), (16 * 5, 5)])
def test_there_are_pages_for_all_sequences_and_the_one_that_left_last_or_what_the_limit_allows(
    endless_engine, limit, pages
):
    model = endless_engine.model
    limit = None if limit is None else model.shape.kv_bytes(limit, 4)
    assert BatchMemory(model, 2, 64, limit)._pool.num_free == pages


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(ALL), st.integers(256, 600), st.integers(1, 40), st.integers(1, 20)),
        min_size=2,
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_any_common_beginning_may_be_shared(endless_engine, sequences, parallel):
    requests = [
        request(key, method, [*DOCUMENT[:common], *ids(own, key)], new)
        for key, (method, common, own, new) in enumerate(sequences)
    ]
    found = collect(fresh(endless_engine).generate_batch(requests, parallel))
    for wanted in requests:
        assert tokens(found[wanted.key]) == tokens(alone(endless_engine, wanted))


def limited(monkeypatch, tokens_of_room):
    """Let batches have so little memory."""
    made = []

    def memory(model, sequences, longest, limit, unit):
        made.append(BatchMemory(model, sequences, longest, model.shape.kv_bytes(tokens_of_room, 4), unit))
        return made[-1]

    monkeypatch.setattr("offload.engine.BatchMemory", memory)
    return made


def test_sequences_wait_for_room_and_give_all_of_it_back(endless_engine, monkeypatch):
    made = limited(monkeypatch, 1024)
    requests = [request(key, ("retrieval", "lookup"), ids(500, key), 12) for key in range(3)]
    found = collect(fresh(endless_engine).generate_batch(requests, 3))
    for wanted in requests:
        assert tokens(found[wanted.key]) == tokens(alone(endless_engine, wanted))
    (memory,) = made
    memory._free_last()
    assert memory._pool.num_free == memory._pages and not memory._pool._users


def test_a_sequence_without_room_fails_alone(endless_engine, monkeypatch):
    limited(monkeypatch, 512)
    requests = [request(key, ("ar", "lookup"), ids(length, key), 8) for key, length in enumerate([100, 900, 120])]
    found = collect(fresh(endless_engine).generate_batch(requests, 2))
    (failed,) = found[1]
    assert (
        isinstance(failed, Failed)
        and isinstance(failed.error, OutOfMemory)
        and "room for 256.0 KiB" in str(failed.error)
    )
    assert [tokens(found[key]) for key in (0, 2)] == [tokens(alone(endless_engine, requests[key])) for key in (0, 2)]


def pool_with_a_beginning(engine, pages, count=40):
    """Return a pool, a store in it with so many tokens, and their keys and values."""
    model = engine.model
    pool = PagePool(model.operations.kernel, model.shape, pages, model.dtype)
    store = PagedStore(pool, 64)
    kv = torch.randn(2, model.shape.layers, model.shape.kv_heads, count, model.shape.head_dim)
    store.write(0, *kv)
    return pool, store, kv


def test_a_shared_page_is_copied_by_whoever_writes_to_it_first(endless_engine):
    pool, first, kv = pool_with_a_beginning(endless_engine, 8)
    second = PagedStore(pool, 64, first, 40)
    assert pool.num_free == 8 - 4 - 2
    for store, other in ((second, first), (first, second)):
        store.begin(20, 2)
        new = torch.randn_like(kv[:, :, :, :2])
        store.write(20, *new)
        for found, expected in zip(store.read(20, 22), new, strict=True):
            assert torch.equal(found, expected)
        assert all(
            torch.equal(x[:, :, :20], y[:, :, :20])
            for each in (store, other)
            for x, y in zip(each.read(0, 40), kv, strict=True)
        )
    first.release()
    second.release()
    assert pool.num_free == 8


def test_sequences_of_other_lengths_share_nothing_if_rope_depends_on_the_length(tmp_path):
    """One has room for a tree, the other for as many more tokens, so that both take as many pages."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    engine = Engine(make_model(tmp_path, max_position_embeddings=64, rope_parameters=rope), (), 16)
    requests = [request(key, ("ar", "lookup"), [*ids(300), *ids(10, key)], new) for key, new in enumerate([40, 140])]
    requests[0] = replace(requests[0], speculation=replace(requests[0].speculation, tree="100"))
    requests[1] = replace(requests[1], speculation=replace(requests[1].speculation, tree="chain"))
    found = collect(engine.generate_batch(requests, 2))
    for wanted in requests:
        assert tokens(found[wanted.key]) == tokens(alone(engine, wanted))


def test_blocks_of_prompts_on_disk_are_restored_behind_shared_pages(tmp_path, endless_engine, monkeypatch):
    make_hf_model("llama").save_pretrained(tmp_path / "model")
    operations = endless_engine.model.operations
    engine = engine_on(tmp_path / "model", tmp_path / "prompts", operations=operations)
    requests = [request(key, ("ar", "lookup"), [*DOCUMENT, *ids(200, 1 + key)], 8) for key in range(3)]
    expected = [tokens(collect(engine.generate_batch([each], 1))[each.key]) for each in requests]
    limited(monkeypatch, 16 * (57 + 2 * 17))
    events = list(engine.generate_batch(requests, 3))
    assert any(isinstance(event, Restored) for _, event in events)
    assert [tokens(collect(events)[each.key]) for each in requests] == expected
