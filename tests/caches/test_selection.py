"""Selections of chunks after a rollback: those of a cache that has never run the rejected tokens."""

import pytest
import torch

from offload.caches.full import FullCache
from offload.caches.selection import RetrievalSelector
from tests.support.stores import CAPACITY, CHUNK, new_rope, new_store, projected, tiny_shape

IDS = [(11 * position) % 249 for position in range(240)]
SLOTS = 6


def run(cache, ids):
    cache.begin(len(ids))
    for layer in range(tiny_shape().layers):
        cache.attend(layer, *projected(ids, layer))
    cache.commit()


def new_cache(store):
    cache = FullCache(new_store(store), new_rope(torch.float32), CAPACITY)
    cache.keep_queries()
    return cache


def selected(selector, cache):
    return selector.select(cache, cache.length // CHUNK, SLOTS).sort(dim=-1).values


@pytest.mark.parametrize("store", ["plain", "blocks"])
def test_a_chunk_of_which_a_part_was_rolled_back_is_scored_anew(store):
    for border in (6 * CHUNK, 9 * CHUNK):
        for length in (border - 1, border, border + 1, border + 2):
            cache, selector = new_cache(store), RetrievalSelector(1, CHUNK)
            run(cache, IDS[:length] + IDS[120:160])
            selected(selector, cache)
            selector.truncate(cache.truncate(length))
            run(cache, IDS[length:])
            fresh = new_cache(store)
            run(fresh, IDS)
            assert torch.equal(selected(selector, cache), selected(RetrievalSelector(1, CHUNK), fresh)), length
