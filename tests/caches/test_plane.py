"""The draft level on plane A of packed keys and values: it reads them in place, and never changes them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.architecture.rope import rotate
from offload.caches.plane import PlaneCache
from offload.caches.selection import RecencySelector
from offload.kernels.attention import attend
from offload.kernels.native.ops import NativeOperations
from offload.kernels.packed_kv import pack_runs, unpack_runs
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.packed_store import RUN
from offload.sequence import TokenSequence
from tests.support.models import make_hf_model
from tests.support.offloading import CPU, native_kernel
from tests.support.retrieval import CYCLE, INTERRUPT, LOOKUP, PLAIN, RESTART, VOCAB, RetrievalSetup, ids, take_step

SETUP = RetrievalSetup(PlaneCache, RUN, budget=600, capacity=600)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", vocab_size=VOCAB, head_dim=32).save_pretrained(folder)
    native = NativeOperations(native_kernel())
    model = load_model(FolderCheckpoint(folder), torch.bfloat16, CPU, lambda done, total: None, native)
    model.kv = "packed"
    return model


def planes(x, y):
    """Return what plane A has of one layer's keys and values `[kv_heads, 128, head_dim]`."""
    runs, fits = pack_runs(x.contiguous(), y.contiguous())
    assert fits.all()
    return unpack_runs(runs, x.shape[2], plane=True)


def test_attention_is_over_plane_a_of_packed_runs_and_over_the_newest_tokens_as_they_are(model):
    full, middle, sequence = SETUP.prefilled(model, 300, selector=RecencySelector)
    middle.rows(sequence)
    cache, shape = middle.cache, model.shape
    cache.begin(1)
    q = 20 * torch.randn(1, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    k, v = torch.zeros(2, 1, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    found = cache.attend(1, q, k, v).clone().float()
    exact = [x[1].clone() for x in full.cache.store.read(0, 301)]
    rounded = [x.clone() for x in exact]
    for run in (slice(0, RUN), slice(RUN, 2 * RUN)):
        rounded[0][:, run], rounded[1][:, run] = planes(*(x[:, run] for x in exact))
    rotated = rotate(q, full.cache.rope.rows(300, 301))
    expected, other = (attend(rotated, *both).out.float() for both in (rounded, exact))
    assert (found - expected).norm() < (other - expected).norm() / 3


def test_a_draft_on_tokens_that_are_there_changes_none(model):
    full, middle, sequence = SETUP.prefilled(model, 500, selector=RecencySelector)
    expected = full.rows(sequence)
    middle.rows(sequence)
    kept = [x.clone() for x in full.cache.store.read(0, 500)]
    middle.cache.truncate(60)
    model.forward(torch.tensor(ids(70)), middle.cache)
    assert all(map(torch.equal, full.cache.store.read(0, 500), kept))
    full.truncate(499)
    assert torch.equal(full.rows(sequence), expected)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(CYCLE, LOOKUP, INTERRUPT, RESTART, PLAIN), min_size=1, max_size=8))
def test_the_full_cache_keeps_the_bits_of_one_that_nothing_was_drafted_on(model, steps):
    full, middle = SETUP.pair(model, selector=RecencySelector)
    sequence = TokenSequence(ids(260))
    list(full.prefill(sequence))
    for kind, first, second in steps:
        take_step(full, middle, sequence, ("restart" if len(sequence) > 500 else kind, first, second))
        middle.rows(sequence, [3])
        assert middle.cache.length == len(sequence) + 1 == middle.num_cached
    other = SETUP.full(model)
    expected = other.rows(sequence, [3])
    for ours, theirs in zip(*(each.cache.store.read(0, full.num_cached) for each in (full, other)), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(full.rows(sequence, [3]), expected)
