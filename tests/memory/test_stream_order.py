"""Whole passes of an offloaded model on a recorded GPU: nothing races, and every wait in the code is needed."""

from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig

from offload.architecture.hf_config import shape_from_config
from offload.caches.factory import selected_cache
from offload.kernels.ops import TorchOperations
from offload.loading.formats.tensor_checks import expected_tensors
from offload.loading.weights import load_model
from offload.memory import factory
from offload.memory.cuda_link import CudaLink
from offload.memory.factory import TieredStoreFactory
from offload.settings.config import Speculation
from offload.weight_offloading.experts import ExpertTier
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.fake_cuda import GPU
from tests.support.offloading import SmallPages
from tests.support.recorded_gpu import recorded_gpu
from tests.support.vector_clocks import races, shared_only, sites

PAGE, CAPACITY = 16, 128
CONFIG = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
    vocab_size=32,
    max_position_embeddings=CAPACITY,
)
SHAPE = shape_from_config(CONFIG.to_dict(), {})


MIXTURE = shape_from_config(
    CONFIG.to_dict()
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    {},
)


class Checkpoint:
    """Random weights."""

    path = Path("random")

    def __init__(self, shape):
        self.shape = shape

    @contextmanager
    def opened(self):
        yield {name: Weight(size) for name, size in expected_tensors(self.shape)}

    def close(self):
        pass


class Weight(NamedTuple):
    size: tuple[int, ...]

    def read(self, part=None):
        return torch.randn(self.size)

    def quantized(self):
        return None


def load(tier=None, shape=SHAPE):
    return load_model(Checkpoint(shape), torch.float32, GPU, lambda done, total: None, TorchOperations(), tier)


def tiered(model, mode="stream", link=None, rope=None, **changes):
    """Return an empty full cache over tiers."""
    settings = SmallPages(mode, **{"page_tokens": PAGE, "share": 0.5 if mode == "hybrid" else None} | changes)
    store = TieredStoreFactory(model.operations, GPU, settings, link).new_store(SHAPE, CAPACITY, torch.float32)
    return model.new_cache(CAPACITY, rope, store)


def run(model, cache, *passes):
    """Run a pass of so many tokens after another; a negative number rolls back that many."""
    for tokens in passes:
        if tokens < 0:
            cache.truncate(cache.length + tokens)
        else:
            model.logits(model.forward(torch.zeros(tokens, dtype=torch.long, device=GPU), cache))


def by_layers(model, cache, tokens, chunk=24):
    return model.forward_by_layers(torch.zeros(tokens, dtype=torch.long, device=GPU), cache, chunk)


SCENARIOS = {}


def scenario(run):
    SCENARIOS[run.__name__.replace("_", " ")] = run
    return run


@scenario
def decoding_after_prefill_in_chunks(model):
    run(model, tiered(model), 40, 23, 1, 1)


@scenario
def decoding_after_prefill_by_layers(model):
    full = tiered(model)
    list(by_layers(model, full, 40))
    list(by_layers(model, full, 37))
    run(model, full, 1)


@scenario
def streamed_verification_with_rejected_drafts(model):
    full = tiered(model, resident_layers=1)
    run(model, full, 12, 12, 12, 5, -3, 12, 16, -30, 4, -4, 14, 3)


@scenario
def hybrid_verification(model):
    run(model, tiered(model, "hybrid"), 45, 45, 3, -2, 3)


@scenario
def attention_on_the_host(model):
    run(model, tiered(model, "host"), 32, 3, -2, 3)


@scenario
def three_buffers(model):
    run(model, tiered(model, buffers=3), 70, 2)


@scenario
def runs_of_pages(model):
    """Two pages are copied at once; the mean keys of a restored prompt come in such runs."""
    full = tiered(model, buffers=3, copy_bytes=4096)
    list(by_layers(model, full, 70))
    run(model, full, 3, -2, 1)
    full.truncate(0)
    full.restore(112, some_kv(112))
    for layer in range(SHAPE.layers):
        full.store.mean_keys(layer, 0, 112, 8)
    run(model, full, 1)


@scenario
def a_restored_prompt(model):
    full = tiered(model)
    run(model, full, 48, 2)
    kept = full.store.dump(0, 48)
    full.truncate(20)
    full.restore(28, kept[:, :, 20:])
    run(model, full, 3, -3)
    full.restore(10, kept[:, :, :10])
    run(model, full, 1)
    full.store.dump(0, full.length)


@scenario
def a_restored_prompt_in_a_new_cache(model):
    full = tiered(model, rope=model.rope(CAPACITY))  # made before: the host waits for its copy
    full.restore(48, some_kv(48))
    run(model, full, 1)


@scenario
def retrieval(model):
    full = tiered(model)
    list(by_layers(model, full, 70))
    run(model, full, 3)
    selected = selected_cache(full, Speculation("retrieval", budget=32, chunk=8, sink=4))
    selected.adopt()
    run(model, selected, 1)
    run(model, full, 3, -1)
    selected.renew()
    selected.adopt()
    run(model, selected, 1)
    full.store.read(10, full.length)


def abort(model, full):
    """Begin a prefill by layers and leave it with copies under way in both directions."""
    run(model, full, 32, 32)
    passing = by_layers(model, full, 40)
    for _ in range(SHAPE.layers):  # all layers, but nothing is committed
        next(passing)
    passing.close()


def some_kv(tokens):
    return torch.zeros(SHAPE.layers, SHAPE.kv_heads, tokens, 2, SHAPE.head_dim)


@scenario
def an_aborted_prefill(model):
    abort(model, full := tiered(model))
    run(model, full, 20, 1)


@scenario
def an_aborted_prefill_before_a_restored_prompt(model):
    abort(model, full := tiered(model))
    full.restore(14, some_kv(14))
    run(model, full, 1)


@scenario
def an_aborted_prefill_before_the_end(model):
    abort(model, tiered(model))


@scenario
def an_aborted_prefill_before_a_dump(model):
    abort(model, full := tiered(model))
    full.store.dump(0, 64)


@scenario
def an_interrupted_wait(model):
    full = tiered(model)
    run(model, full, 40, 1)
    link = full.store.tiers.link

    def interrupt(ticket):
        del link.wait
        raise KeyboardInterrupt

    link.wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(model, full, 1)
    full.restore(4, some_kv(4))
    run(model, full, 1)


@scenario
def streamed_weights(model):
    link = CudaLink(GPU)
    model = load(WeightTier(0, link))
    full = tiered(model, link=link)
    run(model, full, 20, 1)
    list(by_layers(model, full, 20))
    near, other = (model.new_cache(CAPACITY) for _ in range(2))
    passing = by_layers(model, near, 30)
    next(passing)
    run(model, other, 1)
    list(passing)
    passing = by_layers(model, full, 20)
    next(passing)
    passing.close()
    run(model, full, 1)


@scenario
def experts_that_are_copied_for_many_rows_and_run_on_the_host_for_few(model):
    link = CudaLink(GPU)
    model = load(WeightTier(2, link, ExpertTier(0, link, TorchOperations(), 2)), MIXTURE)
    near, other = (model.new_cache(CAPACITY) for _ in range(2))
    run(model, near, 20, 1, 2, 2, 20, 1, 2)
    list(by_layers(model, near, 21, 20))  # the last chunk of a layer runs on the host
    passing = by_layers(model, other, 30)
    next(passing)
    run(model, near, 2)
    passing.close()
    run(model, near, 20, 1, 2)


@cache
def recorded(name, done=False):
    """Record a scenario; see `recorded_gpu` for `done`."""
    with recorded_gpu(done) as gpu, pytest.MonkeyPatch.context() as patches:
        patches.setattr(factory, "why_not", lambda *_: "pages are plain: kernels' accesses are not recorded")
        torch.manual_seed(0)
        model = load()
        SCENARIOS[name](model)
        del model
    return shared_only(gpu.trace)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races(name):
    assert not set(races(recorded(name)))


@pytest.mark.parametrize("name", ["hybrid verification", "decoding after prefill by layers"])
def test_nothing_races_on_a_gpu_that_is_faster_than_the_host(name):
    assert not set(races(recorded(name, done=True)))


# Waits that no scenario needs, by how their sites begin, and why.
REDUNDANT = {
    "host waits for all of compute: ": "kernels do not touch the pages on the host",
    "freed memory waits for to host: record_stream": "the host has waited before it frees these buffers",
    # The next copy into the buffer is on the same stream, and the host writes no page of a pass.
    "host waits for to device: CudaLink.finish < PrefetchRing.drop < PrefetchRing.": "ordered",
    "host waits for to device: CudaLink.finish < PrefetchRing.take": "ordered",
    "host waits for to device: CudaLink.finish < PrefetchRing.reset < StreamedLayers._release": "weights never change",
    "to device waits for to host: CudaLink.copy < PrefetchRing.reset < StreamedLayers._release": "weights never change",
    # The next pass copies on the same streams.
    "host waits for to device: CudaLink.finish < PrefetchRing.reset < Tiers.recover < Tiers.begin": "ordered",
    "to device waits for to host: CudaLink.copy < PrefetchRing.reset < Tiers.recover < Tiers.begin": "ordered",
    "to device waits for to host: CudaLink.copy < copy_now < Pages.read < OpenPages.advance": "the host has waited",
    "to device waits for compute: CudaLink.copy < PrefetchRing._start < PrefetchRing._fill < PrefetchRing.expect < "
    "Tiers.expect < TieredStore.begin": "the last pass has filled them, or a page's copy was awaited",
    # A link compares extents, which overlap where pages do not.
    "to host waits for to device: CudaLink.copy < copy_now < OpenPages._write": "other pages",
}


def needed(each, everything, traces):
    """Return whether some scenario races without a wait; if two wait for the same copy, without both."""
    behind = each.calls.split(" < ")[1:]
    twins = [
        other
        for other in everything
        if behind == other.calls.split(" < ")[1:] != [] and each.what.split()[-2:] == other.what.split()[-2:]
    ]
    return any(any(races(trace, [each, *twins])) for trace in traces)


def test_every_missing_wait_is_a_race():
    traces = {name: recorded(name) for name in SCENARIOS}
    known = {name: sites(trace) for name, trace in traces.items()}
    everything = set().union(*known.values())
    idle = {
        str(each)
        for each in everything
        if not needed(each, everything, [traces[name] for name in traces if each in known[name]])
    }
    unexplained = sorted(each for each in idle if not each.startswith(tuple(REDUNDANT)))
    assert not unexplained, "\n".join(unexplained)
    assert len(everything - idle) > 25
