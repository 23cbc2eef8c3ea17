"""Scores of chunks, on a GPU exact for resident layers and in 8 bits for the others, computed once for each chunk."""

from types import SimpleNamespace

import pytest
import torch

from offload.caches import chunk_scores
from offload.caches.chunk_scores import KeptMeanKeys, LayerScores, PanelMeanKeys
from offload.caches.selection import largest
from tests.support.offloading import native_kernel

LAYERS, HEADS, HEAD_DIM, CHUNK, CHUNKS = 3, 2, 16, 4, 50


class Keys:
    """A store of random keys, `resident` layers of which are on the device; notes whose means it computes."""

    def __init__(self, resident):
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(LAYERS, HEADS, CHUNKS * CHUNK, HEAD_DIM, generator=generator)
        self.keys[..., 3] *= 20  # a few channels of real keys are much larger than the others
        self.shape = SimpleNamespace(layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM)
        self.device, self.resident_layers, self.computed = torch.device("cpu"), resident, []
        self.dtype, self.kernel, self.most = torch.float32, None, 0  # tokens whose means are computed at once

    def mean_keys(self, layer, start, end, chunk):
        self.most = max(self.most, end - start)
        self.computed += [(layer, number) for number in range(start // chunk, end // chunk)]
        return self.keys[layer, :, start:end].unflatten(1, (-1, chunk)).mean(2)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(chunk_scores, "SCORED_BYTES", 7 * 4 * HEADS * HEAD_DIM)


def query():
    return torch.randn(LAYERS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))


def scored(scores, chunks):
    return torch.cat(list(scores.scores(query(), chunks)))


def expected(store, chunks):
    means = store.keys[:, :, : chunks * CHUNK].unflatten(2, (-1, CHUNK)).mean(3)
    return torch.einsum("lkcd,lkd->lkc", means, query()).flatten(0, 1)


def test_the_native_kernel_scores_where_it_attends_and_computes_the_same_products():
    store, kernel = Keys(resident=LAYERS), native_kernel()
    if kernel is None:
        pytest.skip("there is no native kernel")
    assert type(chunk_scores.chunk_scores(store, CHUNK, CHUNKS)) is KeptMeanKeys
    store.kernel = kernel
    scores = chunk_scores.chunk_scores(store, CHUNK, CHUNKS)
    assert isinstance(scores, PanelMeanKeys)
    assert torch.allclose(scored(scores, 30), expected(store, 30), atol=1e-5)
    store.keys[:, :, 25 * CHUNK :] += 1
    scores.truncate(25)
    assert torch.allclose(scored(scores, 41), expected(store, 41), atol=1e-5)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_largest_of_a_row_are_chosen_with_those_that_are_infinite(count):
    scores = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    scores[:, :2] = float("inf")
    found = scores.gather(1, largest(scores, count)).sort(dim=1, descending=True).values
    assert torch.equal(found, scores.sort(dim=1, descending=True).values[:, :count])


def test_resident_layers_have_exact_scores_and_keep_nothing():
    store = Keys(resident=LAYERS)
    scores = LayerScores(store, CHUNK, CHUNKS)
    assert torch.allclose(scored(scores, 41), expected(store, 41), atol=1e-5)
    assert scores._means.numel() == scores._scales.numel() == 0


def test_layers_in_host_memory_have_scores_to_8_bits():
    store = Keys(resident=1)
    found, exact = scored(LayerScores(store, CHUNK, CHUNKS), 41), expected(store, 41)
    largest = store.keys.unflatten(2, (-1, CHUNK)).mean(3).abs().amax(-1)[:, :, :41].flatten(0, 1)
    half_step = largest / 127 / 2
    assert torch.allclose(found[:HEADS], exact[:HEADS], atol=1e-5)
    errors = (found - exact)[HEADS:].abs()
    assert (errors <= half_step[HEADS:] * query()[1:].flatten(0, 1).abs().sum(-1, keepdim=True) + 1e-5).all()
    assert errors.max() > 1e-4  # they are rounded
