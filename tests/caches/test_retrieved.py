"""The retrieval cache as the target's own: against its definition, on plain memory and on blocks."""

import pytest
import torch

from offload.caches.full import FullCache
from offload.caches.retrieval_target import ROOM, RetrievedCache
from offload.settings.config import Speculation
from tests.support.stores import CAPACITY, CHUNK, close, definition, new_rope, new_store, projected, tiny_shape

SINK, WINDOW, BUDGET = 4, 40, 8 * CHUNK  # a chunk of sink, three of window, four of the others
IDS = [(11 * position) % 249 for position in range(CAPACITY)]


def new_cache(store="plain", budget=BUDGET, every=1):
    full = FullCache(new_store(store), new_rope(torch.float32), CAPACITY)
    sizes = {"sink": SINK, "window": WINDOW, "budget": budget, "chunk": CHUNK, "rebuild_every": every}
    return RetrievedCache(full, Speculation(method="ar", approximate="retrieval", **sizes))


def run(cache, ids):
    """Run tokens in passes of as many as there may be; return `[layers, tokens, heads, head_dim]`."""
    found = []
    while ids:
        some = ids[: getattr(cache, "room", ROOM)]
        cache.begin(len(some))
        layers = range(tiny_shape().layers)
        found.append(torch.stack([cache.attend(layer, *projected(some, layer)).clone() for layer in layers]))
        cache.commit()
        ids = ids[len(some) :]
    return torch.cat(found, dim=1)


def chosen_tokens(start, layer, head):
    """Return the positions that the token at `start` attends to with a KV head, by definition, in fp64."""
    shape = tiny_shape()
    whole, group = start // CHUNK, shape.group
    if whole <= BUDGET // CHUNK:
        return list(range(start + 1))
    everything = list(range(start + 1))
    q, k, _ = (x.double() for x in projected(IDS[: start + 1], layer))
    rows = tuple(x.squeeze(1).double() for x in new_rope(torch.float32).rows(0, start + 1))

    def turned(x):
        low, high = x.chunk(2, dim=-1)
        return x * rows[0] + torch.cat((-high, low), dim=-1) * rows[1]

    means = turned(k[:, head])[: whole * CHUNK].view(whole, CHUNK, -1).mean(1)
    scored = range(1, whole - 3)
    scores = torch.zeros(len(scored), dtype=torch.float64)
    for each in range(head * group, (head + 1) * group):
        scores += (means[scored.start : scored.stop] @ turned(q[:, each])[-1] / shape.head_dim**0.5).softmax(0)
    best = {scored[index] for index in scores.topk(4).indices.tolist()}
    return [p for p in everything if p // CHUNK in best or p < CHUNK or p >= (whole - 3) * CHUNK]


@pytest.mark.parametrize("store", ["plain", "blocks"])
def test_each_head_attends_to_the_sink_the_window_and_the_best_chunks(store):
    cache, shape, missed = new_cache(store), tiny_shape(), 0
    for first in range(0, 250, 50):
        run(cache, IDS[first : first + 50])
    for start in range(250, 270):
        found = run(cache, IDS[start : start + 1])
        for layer in range(shape.layers):
            for head in range(shape.kv_heads):
                seen = chosen_tokens(start, layer, head)
                missed += start + 1 - len(seen)
                expected = definition(IDS[: start + 1], start, layer, new_rope(torch.float32), visible=seen)
                heads = slice(head * shape.group, (head + 1) * shape.group)
                assert close(found[layer][:, heads], expected[:, heads])
    assert missed > 0


def test_plain_memory_and_blocks_agree_in_longer_passes():
    results = []
    for store in ("plain", "blocks"):
        cache = new_cache(store)
        results.append(torch.cat([run(cache, IDS[first : first + 60]) for first in range(0, 300, 60)], dim=1))
    assert close(results[0], results[1].double())


@pytest.mark.parametrize("store", ["plain", "blocks"])
def test_a_selection_serves_the_next_tokens_which_see_all_that_came_since(store):
    cache, rope = new_cache(store, every=6), new_rope(torch.float32)
    for first in range(0, 250, 50):
        run(cache, IDS[first : first + 50])
    for start in range(250, 268):
        found = run(cache, IDS[start : start + 1])
        selected_at = start - (start - 250) % 6
        seen = [*chosen_tokens(selected_at, 1, 0), *range(selected_at + 1, start + 1)]
        expected = definition(IDS[: start + 1], start, 1, rope, visible=seen)
        assert close(found[1][:, : tiny_shape().group], expected[:, : tiny_shape().group])


def test_after_a_rollback_all_is_as_if_the_tokens_had_never_been_run():
    cache, fresh = new_cache(), new_cache()
    for first in range(0, 240, 60):
        run(cache, IDS[first : first + 60])
    assert cache.truncate(210) == 210
    for first, last in ((0, 60), (60, 120), (120, 180), (180, 210)):
        run(fresh, IDS[first:last])
    other = IDS[3:33]
    run(cache, other), run(fresh, other)
    assert torch.equal(run(cache, IDS[50:51]), run(fresh, IDS[50:51]))


@pytest.mark.parametrize("store", ["plain", "blocks"])
@pytest.mark.parametrize("length", [13 * CHUNK - 1, 13 * CHUNK, 13 * CHUNK + 1])
def test_nothing_of_a_rejected_answer_is_selected_or_scored(store, length):
    """Neither by the selection that its tokens have made, nor later by the mean keys of a chunk that it completed."""
    cache, rope, shape = new_cache(store, every=8), new_rope(torch.float32), tiny_shape()
    run(cache, IDS[:length])
    for token in IDS[30:60]:
        run(cache, [token])
    cache.truncate(length)
    for start in (length, 275):
        found = run(cache, IDS[start : start + 1])
        for head in range(shape.kv_heads):
            seen = chosen_tokens(start, 1, head)
            expected = definition(IDS[: start + 1], start, 1, rope, visible=seen)
            heads = slice(head * shape.group, (head + 1) * shape.group)
            assert close(found[1][:, heads], expected[:, heads])
        if start < 275:
            run(cache, IDS[start + 1 : 275])


def test_a_budget_for_everything_is_exact():
    cache, exact = new_cache(budget=CAPACITY), FullCache(new_store("plain"), new_rope(torch.float32), CAPACITY)
    for first in range(0, 300, ROOM):
        found = run(cache, IDS[first : first + ROOM])
        assert torch.equal(found, run(exact, IDS[first : first + ROOM]))


def test_only_passes_that_a_prompt_from_the_beginning_has_need_not_be_run_again():
    cache = new_cache()
    run(cache, IDS[: 2 * ROOM + 5])
    assert cache.room == ROOM - 5
    assert [cache.restartable(length) for length in (2 * ROOM + 5, 2 * ROOM, 2 * ROOM - 1)] == [2 * ROOM] * 2 + [ROOM]
    run(cache, IDS[2 * ROOM + 5 : 3 * ROOM])
    assert cache.restartable(3 * ROOM) == 2 * ROOM  # the last pass had fewer tokens
    cache.truncate(2 * ROOM - 1)
    assert cache.restartable(cache.length) == ROOM


@pytest.mark.parametrize("store", ["plain", "blocks"])
def test_after_cached_tokens_a_prompt_has_the_bits_of_one_without(store):
    length = 4 * ROOM + 20
    fresh, cache = new_cache(store), new_cache(store)
    expected = run(fresh, IDS[:length])
    run(cache, IDS[: 2 * ROOM + 9])
    for token in IDS[2 * ROOM + 9 : 3 * ROOM + 7]:  # an answer
        run(cache, [token])
    cached = cache.truncate(cache.restartable(cache.length))
    assert cached == 2 * ROOM
    assert torch.equal(run(cache, IDS[cached:length]), expected[:, cached:])


def test_more_tokens_than_a_pass_may_have_and_trees_are_refused():
    cache = new_cache()
    with pytest.raises(AssertionError, match="at once"):
        cache.begin(ROOM + 1)
    with pytest.raises(NotImplementedError):
        cache.hold()
