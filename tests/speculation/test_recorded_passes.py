"""Recorded passes on the native kernel against the same passes call by call: the same bits."""

import weakref
from dataclasses import replace

import pytest
import torch

from offload import Speculation
from offload.architecture.footprint import activation_bytes
from offload.caches.factory import selected_cache
from offload.kernels.native import KernelUnavailable, find_kernel
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.recording import recorder
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.settings.method_sizes import KEPT_QUERIES
from offload.speculation.passes import recorded_passes
from offload.speculation.passes.recorded_passes import PassRecorder, RecordedPasses
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.models import ids, make_hf_model
from tests.support.offloading import CPU

CAPACITY, PROMPT = 900, 300
SETTINGS = Speculation("retrieval", budget=64, rebuild_every=20)
PARENTS = (-1, 0, 0, 1, 1, 2)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`load(family, kv)`: a model on the native kernel."""
    try:
        operations = NativeOperations(find_kernel())
    except KernelUnavailable as error:
        pytest.skip(str(error))

    def load(family="llama", kv="bf16"):
        folder = tmp_path_factory.mktemp(family)
        make_hf_model(family, head_dim=32).save_pretrained(folder)
        model = load_model(FolderCheckpoint(folder), torch.bfloat16, CPU, lambda done, total: None, operations)
        model.kv = kv
        return model

    return load


@pytest.fixture(scope="module", params=[("llama", "bf16"), ("qwen3", "bf16")], ids="-".join)
def model(load, request):
    return load(*request.param)


def runners(model, middle=None):
    """Return a runner of the full cache and one of a middle level, and the sequence that they follow."""
    full = Runner(model, model.new_cache(CAPACITY))
    middle = SelectedRunner(full, selected_cache(full.cache, SETTINGS, middle))
    sequence = TokenSequence(ids(PROMPT))
    list(full.prefill(sequence))
    return full, middle, sequence


def answers(model, *middle):
    """Yield the rows of drafts, verifications, trees and rejections on both levels, over several selections."""
    full, middle, sequence = runners(model, *middle)
    for turn in range(12):
        new = ids(40, seed=turn)
        drafted = [middle.rows(sequence, new[:count]) for count in range(turn % 4 + 1)]
        drafted.append(middle.tree_rows(sequence, new[:6], PARENTS))
        drafted.append(full.tree_rows(sequence, new[:6], PARENTS) if turn % 2 else full.rows(sequence, new[:turn]))
        sequence.extend(new[: 1 + turn])  # what the next call finds accepted
        drafted.append(full.rows(sequence))
        yield torch.cat(drafted)
    assert middle.cache.selections > 2
    assert (full.graphs is None) == (middle.graphs is None)
    yield full.cache.query()


def test_a_pass_that_is_recorded_has_a_setup(model):
    """Its time is not that of a step, so `auto` must not compare drafts with it."""
    full, _, sequence = runners(model)
    found = [full.setups]
    for drafted in ([], [], [1, 2]):  # recorded once, whatever the number of tokens
        sequence.extend([7])
        full.rows(sequence, drafted)
        found.append(full.setups)
    full.tree_rows(sequence, list(range(6)), PARENTS)
    assert [*found, full.setups] == [0, 1, 1, 1, 2]


def test_recorded_passes_have_the_bits_of_others(model, monkeypatch):
    assert Runner(model, model.new_cache(1)).graphs is not None
    assert_same_bits_recorded(model, monkeypatch)


def assert_same_bits_recorded(model, monkeypatch, *middle):
    recorded = list(answers(model, *middle))
    monkeypatch.setattr("offload.speculation.passes.runner.recorded_passes", lambda model, cache: None)
    for found, expected in zip(recorded, answers(model, *middle), strict=True):
        assert torch.equal(found, expected)


@pytest.fixture
def recorded(monkeypatch):
    """The caches whose calls have been recorded, in order, each with its number of rows."""
    found, record = [], PassRecorder._record

    def noted(self, cache, tokens):
        found.append((cache, tokens))
        return record(self, cache, tokens)

    monkeypatch.setattr(PassRecorder, "_record", noted)
    return found


def test_a_cache_is_recorded_once_for_passes_of_any_number_of_rows(model, recorded):
    full, middle, sequence = runners(model)
    recorded.clear()
    for turn, token in enumerate(ids(60, seed=1)):
        full.rows(sequence, ids(turn % 7, seed=turn))
        middle.rows(sequence, [token, *ids(turn % 5, seed=turn)])
        sequence.extend([token])
    assert middle.cache.selections > 2  # the table stays where it is
    assert {cache for cache, _ in recorded} == {full.cache, middle.cache} and len(recorded) == 2


def test_recordings_are_bounded(model, monkeypatch, recorded):
    monkeypatch.setattr(recorded_passes, "_MOST_KEYS", 1)
    full, _, sequence = runners(model)
    recorded.clear()
    chain, tree = full.rows(sequence, ids(6)), full.tree_rows(sequence, ids(6), PARENTS)
    assert torch.equal(full.rows(sequence, ids(6)), chain)
    assert torch.equal(full.tree_rows(sequence, ids(6), PARENTS), tree)
    assert len(recorded) == 4
    assert full.graphs.serves(KEPT_QUERIES) and not full.graphs.serves(KEPT_QUERIES + 1)


def test_recordings_are_dropped_with_their_cache(model):
    recorder, cache = PassRecorder(model, 8), model.new_cache(32)
    recorder.run(torch.tensor(ids(3)), [(cache, *cache.begin_recorded(3))])
    memory = weakref.ref(cache.store._blocks)
    del cache
    assert memory() is None


def test_a_failed_recording_leaves_nothing(model):
    """An interrupt while a pass is recorded: later calls run, and the cache stays at its committed length."""
    full, _, sequence = runners(model)
    expected = full.rows(sequence)
    full.truncate(PROMPT - 1)
    full.graphs = RecordedPasses(model, full.cache)
    attend, full.cache.attend = full.cache.attend, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        full.rows(sequence)
    full.cache.attend = attend
    assert recorder.recording is None and full.cache.length == PROMPT - 1
    assert torch.equal(full.rows(sequence), expected)


def test_what_torch_computes_is_not_recorded(tmp_path):
    make_hf_model("llama").save_pretrained(tmp_path)
    model = load_model(FolderCheckpoint(tmp_path), torch.float32, CPU, lambda done, total: None, TorchOperations())
    assert Runner(model, model.new_cache(CAPACITY)).graphs is None


def test_a_plan_has_room_for_the_logits_that_a_recorder_keeps(model):
    kept = PassRecorder(model, KEPT_QUERIES)._logits[KEPT_QUERIES].nbytes
    vocab = model.shape.vocab
    planned, twice = (activation_bytes(replace(model.shape, vocab=each), 100, 64, 2) for each in (vocab, 2 * vocab))
    assert twice - planned >= kept > 0
