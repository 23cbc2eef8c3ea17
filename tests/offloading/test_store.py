"""The full cache over tiers of memory: whatever lies where, and however copies dawdle, the output is the same."""

import random

import pytest
import torch

from offload import Speculation
from offload.sequence import TokenSequence
from offload.speculation.hierarchy import selected_cache
from offload.speculation.runner import Runner, SelectedRunner
from tests.support.offloading import (
    CAPACITY,
    PIECE,
    dawdler,
    make_link,
    make_model,
    native_kernel,
    settings,
    tiered_cache,
)

MODES = [("stream", 0), ("host", 0), ("hybrid", 0), ("hybrid", 1), ("stream", 2), ("stream", 3)]


@pytest.fixture(scope="module", params=["torch", "native-fp32", "native-bf16"])
def model(request, tmp_path_factory):
    if request.param != "torch" and native_kernel() is None:
        pytest.skip("there is no native kernel here")
    dtype = torch.bfloat16 if request.param.endswith("bf16") else torch.float32
    return make_model(tmp_path_factory.mktemp("tiers"), dtype, request.param != "torch")


def ids(count, seed=0):
    return torch.randint(0, 267, (count,), generator=torch.Generator().manual_seed(seed))


def same(model, found, expected):
    """Bit for bit among tiers and passes on the kernel; rounded differently by torch, and by a cache in one piece."""
    if model.dtype == torch.bfloat16:
        return (found - expected).abs().max() <= 0.02 * expected.abs().max()
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mode", "resident"), MODES)
@pytest.mark.parametrize("chunk", [5, PIECE, 150, CAPACITY])
def test_any_placement_gives_the_full_cache_s_hidden_rows(model, mode, resident, chunk):
    expected = model.forward(ids(CAPACITY), model.new_cache(CAPACITY))
    cache = tiered_cache(model, settings(mode, resident), make_link(before=dawdler(1)))
    found = torch.cat([model.forward(part, cache) for part in ids(CAPACITY).split(chunk)])
    assert cache.length == CAPACITY
    assert same(model, found, expected)


@pytest.mark.parametrize(("mode", "resident"), MODES)
def test_a_prompt_layer_by_layer_is_a_prompt_chunk_by_chunk(model, mode, resident):
    """Behind a prefix that is there already; the next tokens see what was stored."""
    rows = []
    for by_layers in (False, True):
        cache = tiered_cache(model, settings(mode, resident), make_link(before=dawdler(2)))
        model.forward(ids(90), cache)
        if by_layers:
            list(model.forward_by_layers(ids(400, 1), cache, 50))
        else:
            for part in ids(400, 1).split(50):
                model.forward(part, cache)
        rows.append(torch.cat([model.forward(ids(3, 2), cache), model.forward(ids(70, 3), cache)]))
    assert same(model, *rows)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_end_with_the_same_bits(model, seed):
    """Appends, rollbacks and passes that break off; on the kernel no split may change a bit."""
    rng = random.Random(seed)
    mode, resident = rng.choice(MODES)
    cache = tiered_cache(model, settings(mode, resident), make_link(before=dawdler(seed)))
    held = []
    for _ in range(25):
        if rng.random() < 0.3 and held:
            del held[rng.randrange(len(held) // 2, len(held)) :]
            cache.truncate(len(held))
        if rng.random() < 0.2:
            break_off(model, cache, rng)
        count = min(rng.choice((1, 4, 30, 100)), CAPACITY - 100 - len(held))
        if count > 0:
            new = [rng.randrange(267) for _ in range(count)]
            model.forward(torch.tensor(new), cache)
            held += new
    found = model.forward(ids(5), cache)
    fresh = tiered_cache(model, settings("stream", resident))
    for part in torch.tensor(held).split(40):
        model.forward(part, fresh)
    expected = model.forward(ids(5), fresh)
    assert same(model, found, expected)
    if model.operations.kernel is not None:
        assert torch.equal(found, expected)


def break_off(model, cache, rng):
    """A pass that ends after some of its layers."""
    at, attend = rng.randrange(3), cache.attend

    def failing(layer, *rest):
        if layer == at:
            raise InterruptedError
        return attend(layer, *rest)

    cache.attend = failing
    with pytest.raises(InterruptedError):
        model.forward(ids(rng.choice((1, 50, 90))), cache)
    del cache.attend


def test_reading_gathering_and_mean_keys_are_the_plain_store_s(model):
    whole, cache = model.new_cache(CAPACITY), tiered_cache(model, settings("hybrid", 1))
    for each in (whole, cache):
        for part in ids(300).split(30):
            model.forward(part, each)
        model.forward(ids(2), each)
    tolerance = {"rtol": 0.02, "atol": 0.05} if model.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for start, end in ((0, 302), (10, 20), (250, 302), (60, 70)):
        for found, expected in zip(cache.store.read(start, end), whole.store.read(start, end), strict=True):
            torch.testing.assert_close(found, expected, **tolerance)
    rows, chunks = torch.tensor([0, 1, 2, 3, 4, 5, 5]), torch.tensor([0, 3, 4, 7, 17, 16, 1])
    for found, expected in zip(*(each.store.gather(rows, chunks, 16) for each in (cache, whole)), strict=True):
        torch.testing.assert_close(found, expected, **tolerance)
    for layer in range(3):
        found, expected = (each.store.mean_keys(layer, 48, 288, 16) for each in (cache, whole))
        torch.testing.assert_close(found, expected, **tolerance)


def test_a_runner_prefills_and_rolls_back(model):
    """The cache as decoding uses it: a second prompt that begins like the first."""
    runner = Runner(model, tiered_cache(model, settings("hybrid")), 50)
    first, second = TokenSequence(ids(300).tolist()), TokenSequence([*ids(200).tolist(), *ids(60, 9).tolist()])
    list(runner.prefill(first))
    list(runner.prefill(second))
    fresh = Runner(model, tiered_cache(model, settings("stream")), 50)
    list(fresh.prefill(second))
    assert same(model, runner.rows(second, [5, 6]), fresh.rows(second, [5, 6]))


@pytest.mark.parametrize("chunk", [16, 48, 100])
def test_chunks_never_cross_the_border_of_a_piece(model, chunk):
    """Wanted longer than a piece, or not dividing it, they become what does."""
    settings_of = Speculation("retrieval", chunk=chunk, budget=4 * chunk)
    full = Runner(model, tiered_cache(model, settings("stream")), 50)
    sequence = TokenSequence(ids(500).tolist())
    list(full.prefill(sequence))
    middle = SelectedRunner(full, selected_cache(full.cache, settings_of))
    rows = middle.rows(sequence, [5, 6])
    assert torch.isfinite(rows).all()
