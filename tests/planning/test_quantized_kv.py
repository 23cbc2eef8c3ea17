"""Plans of quantised keys and values: their bytes are those that a run allocates, and they are read in less time."""

from dataclasses import replace

import pytest
import torch

from offload.architecture.kv_formats import GROUP
from offload.caches.full import FullCache
from offload.caches.h2o import H2OCache
from offload.hardware.rates import READ
from offload.memory.block_store import BlockStore
from offload.memory.quantized_store import QuantizedStore
from offload.planning.passes import Passes
from offload.planning.placement import place
from offload.settings.config import Speculation
from offload.settings.kv_formats import BF16, KV_FORMATS
from offload.settings.method_sizes import forgetting_capacity, stored_tokens
from offload.units import GIB
from tests.support.offloading import native_kernel
from tests.support.planning import HARDWARE, parts_on_cpu, request
from tests.support.stores import new_rope, projected, tiny_shape

KINDS = ["q8"]
CPU = replace(HARDWARE["cpu"], memory=64 * GIB)
TOKENS = 32 * 1024


def on_cpu(kind=BF16, hardware=CPU, **speculation):
    return replace(
        request(tokens=TOKENS, **speculation), hardware=hardware, kv=kind, lists_chunks=True, prefill_chunk=512
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [40, 130, 512])
def test_what_a_store_allocates_is_what_is_counted(kind, chunk):
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    shape, tokens = tiny_shape(), 300
    store = QuantizedStore(native_kernel(), shape, tokens, torch.bfloat16, kind)
    cache = FullCache(store, new_rope(torch.bfloat16), tokens)
    for start in range(0, tokens, chunk):
        ids = [token % 250 for token in range(min(chunk, tokens - start))]
        cache.begin(len(ids))
        for layer in range(shape.layers):
            cache.attend(layer, *projected(ids, layer, torch.bfloat16))
        cache.commit()
    counted = parts_on_cpu(shape, tokens, request().speculation, prefill_chunk=chunk, kv=kind)["KV cache"]
    allocated = store.groups.memory.nbytes + store.ring.store._blocks.nbytes
    assert 0.75 * counted <= allocated <= counted


def test_what_a_cache_that_evicts_allocates_is_what_is_counted():
    """Beside the store, it has its tokens before RoPE."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    settings = Speculation(method="ar", approximate="h2o", sink=2, window=5, budget=512, chunk=1)
    tokens = forgetting_capacity(settings)
    store = BlockStore(native_kernel(), tiny_shape(), tokens, torch.bfloat16)
    cache = H2OCache(FullCache(store, new_rope(torch.bfloat16), tokens), settings)
    counted = parts_on_cpu(tiny_shape(), stored_tokens(settings, 9999), settings)["KV cache"]
    allocated = store._blocks.nbytes + cache.nbytes
    assert 0.9 * counted <= allocated <= counted


@pytest.mark.parametrize("kind", KINDS)
def test_attention_takes_its_bytes_at_the_rate_of_conversion(kind):
    passes = {each: Passes(on_cpu(each), place(on_cpu(each))) for each in (BF16, kind)}
    seconds = {each: passes[each].full(1)[0].resources["device memory"] for each in passes}
    size = request().shape.kv_bytes(TOKENS, 2)
    smaller = KV_FORMATS[kind].run_bytes(128) / (4 * GROUP * 128)
    expected = size * (smaller / KV_FORMATS[kind].rate - 1) / CPU.bandwidth / READ
    assert seconds[kind] - seconds[BF16] == pytest.approx(expected)
