"""A draft model's runner leaves out the tokens that its cache would drop, and catches up after any rollback."""

import pytest
import torch

from offload.caches.streaming_llm import StreamingCache
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.model.decoder import Model
from offload.sequence import TokenSequence
from offload.speculation.passes.draft_runner import WINDOWS, DraftRunner
from tests.support.models import make_hf_model

SINK, WINDOW, CHUNK = 3, 8, 8
READ = SINK + WINDOWS * WINDOW


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One layer: a token's row depends on the kept tokens alone, not on what they saw themselves."""
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", num_hidden_layers=1).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, torch.device("cpu"), lambda done, total: None)


@pytest.fixture
def runner(model):
    rope = model.rope(SINK + WINDOW + CHUNK)
    return DraftRunner(model, StreamingCache(model.shape, rope, SINK, WINDOW, CHUNK, model.dtype, model.device), CHUNK)


@pytest.fixture
def lengths(monkeypatch):
    """How many tokens each forward pass has."""
    found, forward = [], Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, x, *rest: (found.append(len(x)), forward(self, x, *rest))[1])
    return found


def ids(count, seed=0):
    return torch.randint(0, 267, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def is_exact(runner, sequence, model, token=7):
    """Whether one more token's row is that of a full cache of sink and window."""
    sequence.extend([token])
    kept = sequence.tokens[:SINK] + sequence.tokens[-WINDOW - 1 :]
    expected = model.forward(torch.tensor(kept), model.new_cache(len(kept)))[-1:]
    return torch.allclose(runner.rows(sequence), expected, atol=1e-4)


@pytest.mark.parametrize("length", [1, SINK, 20, READ, READ + 1, 200])
def test_a_prompt_s_sink_and_last_windows_are_run(runner, lengths, length):
    events = list(runner.read(TokenSequence(ids(length))))
    assert sum(lengths) == min(length, READ)
    assert runner.num_cached == runner.cache.length == length
    assert events[0].done == 0
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert events[-1].done == events[-1].total <= READ


def test_rows_after_a_skip_are_those_of_sink_and_window(model, runner):
    sequence = TokenSequence(ids(200))
    list(runner.read(sequence))
    for token in ids(30, 1):
        assert is_exact(runner, sequence, model, token)


def test_it_catches_up_after_a_rest_and_after_another_prompt(model, runner, lengths):
    sequence = TokenSequence(ids(200))
    list(runner.read(sequence))
    sequence.extend(ids(500, 1))
    lengths.clear()
    runner.rows(sequence)
    assert sum(lengths) <= READ
    assert is_exact(runner, sequence, model)
    for prompt in (ids(90) + ids(300, 2), ids(90) + ids(290, 2) + ids(10, 3), ids(370)):
        sequence.restart(prompt)
        lengths.clear()
        list(runner.read(sequence))
        assert sum(lengths) <= READ
        assert is_exact(runner, sequence, model)
    lengths.clear()
    assert list(runner.read(sequence)) == []  # nothing is new
    assert lengths == []
