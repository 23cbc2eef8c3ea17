"""Caches that evict: StreamingLLM and H2O against a slow reference, in passes of any size, rolled back, interrupted."""

import pytest
import torch

from offload.caches.evicting import SinkCache
from offload.caches.h2o import H2OCache
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.block_store import BlockStore
from offload.sequence import TokenSequence
from offload.settings.config import Speculation
from offload.speculation.levels.approximate import ApproximateRunner
from tests.support.evicting import SlowCache, keep_heavy, keep_latest
from tests.support.models import ids
from tests.support.offloading import CPU

SINK, WINDOW, BUDGET = 2, 5, 16
CACHES = {"StreamingLLM": (SinkCache, keep_latest(SINK)), "H2O": (H2OCache, keep_heavy(SINK, WINDOW))}


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(FolderCheckpoint(tiny_model_dir), torch.float32, CPU, lambda done, total: None)


@pytest.fixture(params=CACHES)
def kind(request):
    return CACHES[request.param]


def new_cache(model, kind, every, store=None):
    settings = Speculation(method="ar", approximate="h2o", sink=SINK, window=WINDOW, budget=BUDGET, chunk=1)
    return kind[0](model.new_cache(BUDGET + every, store=store), settings)


def new_runner(model, kind, every=8, chunk=512):
    return ApproximateRunner(model, new_cache(model, kind, every), chunk)


def decode(model, cache, prompt, count):
    """Return greedy tokens, one pass for each token of the prompt and of the answer, and their logits."""
    found, rows = [], []
    for position in range(len(prompt) + count - 1):
        token = prompt[position] if position < len(prompt) else found[-1]
        logits = model.logits(model.forward(torch.tensor([token]), cache))
        if position >= len(prompt) - 1:
            rows.append(logits)
            found.append(int(logits.argmax()))
    return found, torch.cat(rows)


@pytest.mark.parametrize("every", [1, 6])
def test_greedy_decoding_equals_the_slow_reference_token_for_token(model, kind, every):
    reference = SlowCache(model, kind[1], BUDGET, every)
    expected, logits = decode(model, reference, ids(40), 40)
    found, own = decode(model, new_cache(model, kind, every), ids(40), 40)
    assert found == expected
    assert torch.allclose(own, logits, atol=1e-3)
    assert reference.longest == BUDGET + every
    whole, _ = decode(model, model.new_cache(80), ids(40), 40)
    assert found != whole  # tokens were missed


@pytest.fixture
def native_model(tiny_model_dir, native_operations):
    return load_model(FolderCheckpoint(tiny_model_dir), torch.float32, CPU, lambda done, total: None, native_operations)


def test_the_native_kernels_scores_evict_what_the_slow_references_do(native_model, kind):
    reference = SlowCache(native_model, kind[1], BUDGET, 6)
    expected, logits = decode(native_model, reference, ids(60), 60)
    store = BlockStore(native_model.operations.kernel, native_model.shape, BUDGET + 6, native_model.dtype)
    found, own = decode(native_model, new_cache(native_model, kind, 6, store), ids(60), 60)
    assert found == expected
    assert torch.allclose(own, logits, atol=1e-3)


def test_the_native_kernel_gives_the_same_bits_in_passes_of_any_size(tiny_model_dir, kind, native_operations):
    model = load_model(
        FolderCheckpoint(tiny_model_dir), torch.bfloat16, CPU, lambda done, total: None, native_operations
    )
    found = []
    for chunk in (1, 7, 512):
        store = BlockStore(native_operations.kernel, model.shape, BUDGET + 8, model.dtype)
        runner = ApproximateRunner(model, new_cache(model, kind, 8, store), chunk)
        found.append(runner.rows(TokenSequence(ids(100))))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("length", [30, 33, 38, 39])
def test_after_a_rollback_all_is_as_if_the_tokens_had_never_been_run(model, kind, length):
    """From 40 tokens back: some of these lengths are within reach, others are not."""
    runner, sequence = new_runner(model, kind), TokenSequence(ids(40))
    list(runner.prefill(sequence))
    sequence.truncate(length)
    sequence.extend(ids(20, seed=1))
    assert torch.allclose(runner.rows(sequence), new_runner(model, kind).rows(sequence), atol=1e-4)


@pytest.mark.parametrize("is_told", [False, True])
def test_an_interrupted_eviction_starts_over(model, kind, monkeypatch, is_told):
    runner, sequence = new_runner(model, kind), TokenSequence(ids(60))
    cache, keep = runner.cache, runner.cache.keep

    def interrupt(layer, stored):
        if layer and not interrupted:
            interrupted.append(layer)
            raise KeyboardInterrupt
        return keep(layer, stored)

    interrupted = []
    monkeypatch.setattr(cache, "keep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(runner.prefill(sequence))
    assert cache.length == 0 and cache.room == new_runner(model, kind).cache.room
    if is_told:
        runner.truncate(0)  # after which no token is cached that the next call would miss
    assert torch.allclose(runner.rows(sequence), new_runner(model, kind).rows(sequence), atol=1e-4)


def test_more_tokens_than_there_is_room_for_and_trees_are_refused(model, kind):
    cache = new_cache(model, kind, 8)
    with pytest.raises(AssertionError, match="at once"):
        cache.begin(cache.room + 1)
    with pytest.raises(NotImplementedError):
        cache.hold()
    assert cache.length == 0
