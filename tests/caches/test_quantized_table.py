"""A retrieval cache of quantised copies: attention to those of the selected chunks, and exact text."""

import pytest
import torch

from offload.caches.block_table import TableCache
from offload.caches.full import FullCache
from offload.caches.selection import RecencySelector, Refresh
from offload.memory.quantized_groups import dequantized, group_items
from tests.support.engine import fresh, run, tokens
from tests.support.models import ids
from tests.support.offloading import native_kernel
from tests.support.stores import close, new_rope, new_store, projected, tiny_shape

PROMPT = [(11 * position) % 249 for position in range(200)]
CHUNK = 32


def new_cache(kind, dtype=torch.float32):
    full = FullCache(new_store("blocks", dtype), new_rope(dtype), 320)
    cache = TableCache(full, RecencySelector(4, CHUNK), Refresh(None), 3 * CHUNK, CHUNK, 32, kind)
    attend(full, PROMPT)
    cache.adopt()
    return full, cache


def attend(cache, new):
    cache.begin(len(new))
    found = torch.stack([cache.attend(layer, *projected(new, layer, torch.float32)).clone() for layer in range(3)])
    cache.commit()
    return found


def dequantize(cache, layer, groups):
    heads, head_dim = tiny_shape().kv_heads, tiny_shape().head_dim
    items = group_items(heads, groups, groups)
    both = dequantized(native_kernel(), cache._groups[layer], items, head_dim, torch.float32)
    return [x.view(heads, -1, head_dim) for x in both]


def expected(full, cache, new, groups):
    """Attention over the same tokens, those of the groups dequantised."""
    other = new_store("blocks")
    keys, values = (x.clone() for x in full.store.read(0, len(PROMPT)))
    for layer in range(3):
        k, v = dequantize(cache, layer, groups)
        at = [32 * group + token for group in groups for token in range(32)]
        keys[layer][:, at], values[layer][:, at] = k, v
    kept = [*range(32), *range(128, len(PROMPT))]
    other.write(0, keys[:, :, kept], values[:, :, kept])
    rows = full.rope.rows(len(PROMPT), len(PROMPT) + len(new))
    found = []
    for layer in range(3):
        q = other.append(layer, len(kept), *projected(new, layer, torch.float32), rows)
        found.append(other.attend(layer, q, len(kept)).clone())
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["q4", "q8", "fp8"])
def test_it_attends_to_quantised_copies_of_the_selected_chunks_and_to_the_tail(kind):
    full, cache = new_cache(kind)
    new = [3, 1, 4, 1, 5]
    found = attend(cache, new)
    assert close(found, expected(full, cache, new, [0, 4, 5]))


def test_only_selected_groups_are_quantised_and_those_of_changed_tokens_again():
    full, cache = new_cache("q8")
    attend(cache, [1])
    assert cache._known.any(0).any(0).nonzero().flatten().tolist() == [0, 4, 5]
    full.truncate(140)
    attend(full, [7] * 60)
    cache.adopt()
    attend(cache, [1])
    keys = full.store.read(128, 192)[0][1]
    copies, _ = dequantize(cache, 1, [4, 5])
    assert (copies - keys).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize("method", ["retrieval", "triforce", "auto"])
def test_greedy_text_is_that_of_plain_decoding(endless_engine, method, kind):
    prompt = ids(300)
    plain = tokens(run(fresh(endless_engine), prompt, 60))
    more = {"budget": 128, "chunk": 8, "gamma2": 4, "retrieval_kv": kind}
    assert tokens(run(fresh(endless_engine), prompt, 60, method, **more)) == plain
