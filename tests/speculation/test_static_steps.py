"""Passes filled up to a fixed number of rows against passes of their own size, for every cache that has such steps.

On the CPU they are repeated without a recording: by torch's attention with a mask, and by Triton's interpreter.
"""

import pytest
import torch

from offload import Speculation
from offload.caches.factory import selected_cache
from offload.caches.retrieval import CopiedCache
from offload.caches.streaming_llm import StreamingCache
from offload.errors import Degraded
from offload.kernels import triton
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.model.decoder import Model
from offload.sequence import TokenSequence
from offload.settings.config import LONGEST_GAMMA
from offload.speculation.passes.cuda_graphs import CudaRecorder, StepGraphs
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.models import id_tensor, make_hf_model
from tests.support.offloading import CPU

LONGEST = LONGEST_GAMMA + 1
SINK, WINDOW, INFLIGHT = 4, 40, 64
CAPACITY = 700
RETRIEVAL = Speculation("retrieval", budget=64, chunk=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    make_hf_model("llama").save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None, TorchOperations())


def full_cache(model):
    return model.new_cache(CAPACITY)


def selected_from(model):
    cache = full_cache(model)
    cache.keep_queries()
    return cache


def streaming_cache(model):
    rope = model.rope(SINK + WINDOW + INFLIGHT)
    return StreamingCache(model.shape, rope, SINK, WINDOW, INFLIGHT, model.dtype, model.device)


CACHES = {"full": full_cache, "full with queries": selected_from, "StreamingLLM": streaming_cache}


class Pair:
    """Two caches of a kind, one run in fixed shapes and one not, which must give the same rows."""

    def __init__(self, model, new, record=lambda run: run):
        self.model, self.eager, self.static = model, new(model), new(model)
        self.recorded = []
        self.graphs = StepGraphs(model, self.static, lambda run: self.recorded.append(1) or record(run))

    def prefill(self, ids):
        for part in ids.split(INFLIGHT):
            for cache in (self.eager, self.static):
                self.model.forward(part, cache)

    def step(self, ids):
        """Run a pass on both, and compare."""
        assert self.graphs.serves(len(ids))
        found, expected = self.graphs.forward(ids), self.model.forward(ids, self.eager)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert self.static.length == self.eager.length

    def truncate(self, length):
        left = self.eager.truncate(length)
        assert self.static.truncate(length) == left
        return left


@pytest.fixture(params=CACHES)
def pair(model, request):
    return Pair(model, CACHES[request.param])


def test_passes_of_any_size_give_the_rows_of_unpadded_ones(pair):
    """From the first token on, across the sink, the window's border, and moves within a StreamingLLM buffer."""
    for count in [1, 2, 1, 3, *range(1, 18), 31, 32, LONGEST]:
        pair.step(id_tensor(count, count))
    assert len(pair.recorded) == 7  # 1, 2, 4, ... 64 rows


def test_a_refused_draft_and_what_fills_a_pass_up_are_never_seen(pair):
    pair.prefill(id_tensor(150))
    for step, (drafted, kept) in enumerate([(5, 2), (17, 1), (1, 1), (9, 9), (33, 4), (2, 1), (16, 16)]):
        pair.step(id_tensor(drafted, step))
        assert pair.truncate(pair.eager.length - drafted + kept) > 0
    pair.prefill(id_tensor(40, 7))  # without a recording, over what filled the passes up
    pair.step(id_tensor(3, 8))


def test_queries_wanted_after_a_recording_are_kept(model):
    pair = Pair(model, full_cache)
    for step in range(2):
        pair.step(id_tensor(3, step))
        pair.static.keep_queries()
        pair.eager.keep_queries()
    torch.testing.assert_close(pair.static.query(), pair.eager.query(), rtol=1e-4, atol=1e-4)
    assert len(pair.recorded) == 2


def runners(model, record=None):
    """Return a prefilled full runner, its retrieval runner, with recorded steps or not, and the sequence."""
    full = Runner(model, model.new_cache(600), 64)
    sequence = TokenSequence(torch.randint(0, 267, (300,), generator=torch.Generator().manual_seed(0)).tolist())
    list(full.prefill(sequence))
    middle = SelectedRunner(full, selected_cache(full.cache, RETRIEVAL))
    if isinstance(middle.cache, CopiedCache):  # not the full cache's store
        for each in middle.cache.store.layer(slice(None)):
            each.fill_(float("nan"))  # as allocated memory may be
    if record is not None or middle.graphs is not None:  # made anew, because they clear the store
        middle.graphs = StepGraphs(model, middle.cache, record)
    return full, middle, sequence


def decode(model, record):
    """Return the rows of drafts, of a verification that accepts some of them, and of drafts after a new selection."""
    full, middle, sequence = runners(model, record)
    rows = []
    for draft in ([5], [5, 6], [5, 6, 7, 8], [9] * 20):
        rows.append(middle.rows(sequence, draft))
        full.rows(sequence, draft)
        sequence.extend(draft[: len(draft) // 2 + 1])
        sequence.commit()
        full.settle(sequence)
        if len(draft) == 4:
            middle.renew()
    return rows


def test_fixed_shapes_over_a_selection_give_the_rows_of_growing_ones(model):
    recorded = []
    found, expected = (decode(model, record) for record in (lambda run: recorded.append(run) or run, None))
    assert recorded
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["full", "StreamingLLM"])
def test_by_triton_nothing_behind_the_keys_that_are_seen_is_read(model, name, monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton's kernels run on the CPU only in its interpreter")
    pair = Pair(model, CACHES[name])
    pair.prefill(id_tensor(30))
    for cache in (pair.static, pair.eager):
        for layer in range(model.shape.layers):
            keys, values = (cache if name == "StreamingLLM" else cache.store).layer(layer)
            keys[:, 30:] = values[:, 30:] = float("nan")
    monkeypatch.setattr(triton, "serves", lambda q: len(q) <= triton.ROWS)
    for step, count in enumerate([3, 1]):
        pair.step(id_tensor(count, step))
        pair.truncate(pair.eager.length - count + 1)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_recording_that_fails_on_its_way_is_the_last_and_leaves_the_cache_right(model, name, layers, monkeypatch):
    run_layer, attempts = Model._run_layer, []

    def run_some(self, index, *rest):
        if index == layers:
            raise ValueError("not allowed in a capture")
        return run_layer(self, index, *rest)

    def record(run):
        attempts.append(1)
        if len(attempts) > 1:
            with monkeypatch.context() as patched:
                patched.setattr(Model, "_run_layer", run_some)
                run()
            raise ValueError("not allowed at the end of a capture")
        return run

    pair = Pair(model, CACHES[name])
    pair.graphs = StepGraphs(model, pair.static, record)
    pair.prefill(id_tensor(50))
    pair.step(id_tensor(5, 1))
    pair.truncate(pair.eager.length - 3)
    with pytest.warns(Degraded, match="not allowed"):
        pair.step(id_tensor(9, 2))
    assert not any(pair.graphs.serves(count) for count in range(1, 40))
    for step, count in enumerate((1, 9, 20)):
        pair.truncate(pair.eager.length - step)
        found, expected = (model.forward(id_tensor(count, step), cache) for cache in (pair.static, pair.eager))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(attempts) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", CACHES)
def test_cuda_graphs_give_the_rows_of_unpadded_passes(tmp_path, name):
    make_hf_model("llama").save_pretrained(tmp_path)
    on_gpu = torch.device("cuda", 0)
    model = load_model(FolderCheckpoint(tmp_path), torch.float32, on_gpu, lambda done, total: None, TorchOperations())
    pair = Pair(model, CACHES[name], CudaRecorder(on_gpu))
    pair.prefill(id_tensor(150).to(on_gpu))
    for step, count in enumerate([1, 1, 3, 3, 9, 33, 33, 2, 1]):
        pair.step(id_tensor(count, step).to(on_gpu))
        pair.truncate(pair.eager.length - count // 2)
