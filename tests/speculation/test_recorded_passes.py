"""Recorded passes on the native kernel against the same passes call by call: the same bits."""

import pytest
import torch

from offload import Speculation
from offload.kernels.native import KernelUnavailable, find_kernel
from offload.kernels.native.library import Pass
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.recording import recorder
from offload.kernels.ops import TorchOperations
from offload.levels import KEPT_QUERIES
from offload.loading.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation import recorded_passes
from offload.speculation.hierarchy import selected_cache
from offload.speculation.recorded_passes import RecordedPasses
from offload.speculation.runner import Runner, SelectedRunner
from tests.support.models import ids, make_hf_model
from tests.support.offloading import CPU

CAPACITY, PROMPT = 900, 300
SETTINGS = Speculation("retrieval", budget=64, rebuild_every=20)
PARENTS = (-1, 0, 0, 1, 1, 2)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    try:
        operations = NativeOperations(find_kernel())
    except KernelUnavailable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp(request.param)
    make_hf_model(request.param).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.bfloat16, CPU, lambda done, total: None, operations)


def runners(model):
    """Return a runner of the full cache and one of selected chunks, and the sequence that they follow."""
    full = Runner(model, model.new_cache(CAPACITY))
    middle = SelectedRunner(full, selected_cache(full.cache, SETTINGS))
    sequence = TokenSequence(ids(PROMPT))
    list(full.prefill(sequence))
    return full, middle, sequence


def answers(model):
    """Yield the rows of drafts, verifications, trees and rejections on both levels, over several selections."""
    full, middle, sequence = runners(model)
    for turn in range(12):
        new = ids(40, seed=turn)
        drafted = [middle.rows(sequence, new[:count]) for count in range(turn % 4 + 1)]
        drafted.append(middle.tree_rows(sequence, new[:6], PARENTS))
        drafted.append(full.tree_rows(sequence, new[:6], PARENTS) if turn % 2 else full.rows(sequence, new[:turn]))
        sequence.extend(new[: 1 + turn])  # what the next call finds accepted
        drafted.append(full.rows(sequence))
        yield torch.cat(drafted)
    assert middle.cache.selections > 2
    yield full.cache.query()


def test_recorded_passes_have_the_bits_of_others(model, monkeypatch):
    recorded = list(answers(model))
    monkeypatch.setattr("offload.speculation.runner.recorded_passes", lambda model, cache: None)
    for found, expected in zip(recorded, answers(model), strict=True):
        assert torch.equal(found, expected)


def test_a_pass_is_recorded_once(model):
    full, middle, sequence = runners(model)
    assert isinstance(full.graphs, RecordedPasses) and isinstance(middle.graphs, RecordedPasses)
    for token in ids(60, seed=1):
        full.rows(sequence)
        middle.rows(sequence, [token])
        sequence.extend([token])
    assert middle.cache.selections > 2  # the table stays where it is
    assert len(full.graphs._recorded) <= 2 and len(middle.graphs._recorded) <= 3


def test_recordings_are_bounded(model, monkeypatch):
    monkeypatch.setattr(recorded_passes, "_MOST_ROWS", 15)
    full, _, sequence = runners(model)
    expected = {count: full.rows(sequence, ids(count, seed=1)) for count in range(1, 7)}
    assert [rows for rows, _ in full.graphs._recorded] == [6, 7]  # and the last token
    for count, rows in expected.items():
        assert torch.equal(full.rows(sequence, ids(count, seed=1)), rows)
    assert not full.graphs.serves(KEPT_QUERIES + 1)


def test_a_failed_recording_leaves_nothing(model):
    """An interrupt while a pass is recorded: later calls run, and the cache stays at its committed length."""
    full, _, sequence = runners(model)
    expected = full.rows(sequence)
    full.truncate(PROMPT - 1)
    full.graphs._recorded.clear()
    attend, full.cache.attend = full.cache.attend, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        full.rows(sequence)
    full.cache.attend = attend
    assert recorder.recording is None and full.cache.length == PROMPT - 1
    assert torch.equal(full.rows(sequence), expected)


def test_an_interrupt_of_the_first_run_leaves_no_part_of_a_recording(model, monkeypatch):
    full, _, sequence = runners(model)
    expected = full.rows(sequence)
    full.truncate(PROMPT - 1)
    full.graphs._recorded.clear()
    made = []

    def interrupted(**fields):
        made.append(fields)
        if len(made) == 2:
            raise KeyboardInterrupt
        return Pass(**fields)

    with monkeypatch.context() as patches:
        patches.setattr("offload.kernels.native.recording.Pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            full.rows(sequence)
    assert torch.equal(full.rows(sequence), expected)


def test_what_torch_computes_is_not_recorded(tmp_path):
    make_hf_model("llama").save_pretrained(tmp_path)
    model = load_model(FolderCheckpoint(tmp_path), torch.float32, CPU, lambda done, total: None, TorchOperations())
    assert Runner(model, model.new_cache(CAPACITY)).graphs is None
