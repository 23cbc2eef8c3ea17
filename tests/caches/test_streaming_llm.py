"""The StreamingLLM cache against attention over the kept tokens, written out."""

import pytest
import torch

from offload.caches.streaming_llm import StreamingCache
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from tests.support.models import id_tensor, make_hf_model

SINK, WINDOW, INFLIGHT = 3, 8, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Make a model of one layer, in which a row depends only on the kept tokens, not on what they attended to."""
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", num_hidden_layers=1).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, torch.device("cpu"), lambda done, total: None)


def new_cache(model, rope=None):
    rope = rope or model.rope(SINK + WINDOW + INFLIGHT)
    return StreamingCache(model.shape, rope, SINK, WINDOW, INFLIGHT, model.dtype, model.device)


def expected(model, sequence, committed):
    """Return the rows of `sequence[committed:]` from a full cache of the kept tokens alone."""
    kept = sequence[:committed]
    if committed > SINK:
        kept = torch.cat((sequence[:SINK], sequence[max(SINK, committed - WINDOW) : committed]))
    run = torch.cat((kept, sequence[committed:]))
    return model.forward(run, model.new_cache(len(run)))[len(kept) :]


@pytest.mark.parametrize("step", [1, 3, 8])
def test_rows_are_those_of_attention_over_sink_and_window(model, step):
    sequence, cache = id_tensor(120), new_cache(model)
    for start in range(0, 120, step):
        rows = model.forward(sequence[start : start + step], cache)
        assert torch.allclose(rows, expected(model, sequence[: start + step], start), atol=1e-4)
    assert cache.length == 120


@pytest.mark.parametrize("back", [1, 5])
def test_rollback_within_reach_keeps_the_window(model, back):
    sequence, other, cache = id_tensor(100), id_tensor(100, 1), new_cache(model)
    for start in range(0, 100, 5):
        model.forward(sequence[start : start + 5], cache)
        assert cache.truncate(start + 5 - back) == start + 5 - back
        mixed = torch.cat((sequence[: start + 5 - back], other[:2]))
        rows = model.forward(other[:2], cache)
        assert torch.allclose(rows, expected(model, mixed, start + 5 - back), atol=1e-4)
        cache.truncate(start + 5 - back)
        model.forward(sequence[start + 5 - back : start + 5], cache)


def test_a_rollback_out_of_reach_starts_over_and_the_runner_runs_the_tokens_again(model):
    tokens = id_tensor(100).tolist()
    runner, sequence = Runner(model, new_cache(model), chunk=INFLIGHT), TokenSequence(tokens)
    runner.rows(sequence)
    sequence.truncate(20)
    found = runner.rows(sequence)
    fresh = Runner(model, new_cache(model), chunk=INFLIGHT).rows(TokenSequence(tokens[:20]))
    assert torch.allclose(found, fresh, atol=1e-5)
    cache = new_cache(model)
    for part in id_tensor(100).split(INFLIGHT):
        model.forward(part, cache)
    assert (cache.truncate(20), cache.length) == (0, 0)
