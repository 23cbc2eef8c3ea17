"""What a step of fixed shape launches and allocates on a GPU, seen on fake tensors of real shapes."""

import pytest
import torch

from offload import Speculation
from offload.caches.chunk_table import ChunkTableCache
from offload.caches.factory import draft_cache, selected_cache
from offload.caches.full import FullCache
from offload.caches.retrieval import CopiedCache
from offload.kernels import triton
from offload.kernels.triton.ops import useful_splits
from offload.settings.config import LONGEST_GAMMA
from offload.speculation.passes.cuda_graphs import StepGraphs, padded
from tests.support.fake_cuda import GPU, fake_cuda
from tests.support.fake_models import SHAPES, fake_shape, load_fake

LAYERS, CAPACITY, LENGTH = 3, 8192, 6000
MOST_LOADED = 8  # launches that set the inputs, the ids' included
OUTSIDE, BY_TORCH = 9, 60  # launches a layer beside attention
AROUND = 3  # launches a pass: the embedding, and the copy of the hidden rows
SETTINGS = Speculation("retrieval", budget=1024)


def full_cache(model):
    cache = model.new_cache(CAPACITY)
    cache.keep_queries()
    cache.length = LENGTH
    return cache


def retrieval_cache(model):
    cache = selected_cache(full_cache(model), SETTINGS)
    assert isinstance(cache, ChunkTableCache if triton.serves(torch.empty((1, 1, 128), device=GPU)) else CopiedCache)
    cache._rebuild, cache.length, cache.tail_start, cache.exact_end = False, LENGTH - 1, LENGTH - 20, LENGTH
    cache.selection = torch.zeros((model.shape.layers * model.shape.kv_heads, 128), dtype=torch.long, device=GPU)
    return cache


def streaming_cache(model):
    cache = draft_cache(model, SETTINGS)
    cache.length = cache.sink + cache.window + 30
    return cache


CACHES = {"full": full_cache, "retrieval": retrieval_cache, "StreamingLLM": streaming_cache}


@pytest.fixture(params=CACHES)
def new_cache(request):
    return CACHES[request.param]


@pytest.fixture(params=[True, False], ids=["triton", "torch"])
def with_triton(request, monkeypatch):
    monkeypatch.setattr(triton, "serves", lambda q: request.param and q.device == GPU and len(q) <= triton.ROWS)
    monkeypatch.setattr(triton, "serves_rows", lambda x: request.param and x.device == GPU)
    return request.param


@pytest.mark.daily("*-triton-1", "*-triton-33", "*-torch-6")
@pytest.mark.parametrize("tokens", [1, 6, LONGEST_GAMMA + 1])
def test_a_step_waits_for_nothing_and_launches_little(new_cache, with_triton, tokens):
    with fake_cuda() as usage:
        model = load_fake(fake_shape("8B", LAYERS))
        cache = new_cache(model)
        inside = []

        def record(run):
            def repeat():
                with usage.of() as launches:
                    hidden = run()
                inside.append(launches)
                return hidden

            return repeat

        graphs = StepGraphs(model, cache, record)
        ids = torch.zeros(tokens, dtype=torch.long, device=GPU)
        graphs.forward(ids)
        with usage.of() as launches:
            assert graphs.serves(tokens)
            graphs.forward(ids)
    assert usage.to_host == 0
    attention = sum(inside[1][name] for name in ("attend", "finish"))
    assert attention == 2 * LAYERS * with_triton
    by_torch = 30 if new_cache is streaming_cache else OUTSIDE  # it rotates all keys
    most = by_torch if with_triton else BY_TORCH
    assert sum(inside[1].values()) - attention <= most * LAYERS + AROUND
    assert sum(launches.values()) - sum(inside[1].values()) <= MOST_LOADED + 1  # and the copy of the hidden rows


def most_bytes(shape, rows, splits):
    """Return a bound on what a step allocates: the states of attention, or the MLP's activations in bf16."""
    states = splits * shape.heads * (shape.head_dim + 2) * 4
    return rows * (states + 2 * (3 * shape.intermediate + 4 * shape.hidden))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1, LONGEST_GAMMA + 1])
def test_the_memory_of_a_step_is_that_of_its_rows_and_is_given_back(name, tokens, monkeypatch):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    with fake_cuda() as usage:
        model = load_fake(fake_shape(name, LAYERS))
        graphs = StepGraphs(model, full_cache(model), lambda run: run)
        rows, splits = padded(tokens), useful_splits(GPU, model.shape.kv_heads)
        usage.peak = before = usage.now
        graphs.forward(torch.zeros(tokens, dtype=torch.long, device=GPU))
        inputs = 2 * rows * model.shape.head_dim * 2 + 3 * 8 * (rows + 1)
        assert usage.now - before <= inputs
        assert usage.peak - before <= most_bytes(model.shape, rows, splits) + inputs


def test_the_full_cache_has_such_steps_where_triton_attends(with_triton):
    with fake_cuda():
        model = load_fake(fake_shape("8B", LAYERS))
        assert FullCache.has_static_steps.fget(full_cache(model)) == with_triton
