"""Steps with fixed shapes, as recorded on a GPU, give the same rows. Here they are repeated without a recording."""

import pytest
import torch

from offload import Speculation
from offload.caches.factory import selected_cache
from offload.caches.retrieval import CopiedCache
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation.passes.cuda_graphs import StepGraphs
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.models import make_hf_model
from tests.support.offloading import CPU

SETTINGS = Speculation("retrieval", budget=64, chunk=8)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    make_hf_model(request.param).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None, TorchOperations())


def runners(model, record=None):
    """Return a prefilled full runner, its retrieval runner, with recorded steps or not, and the sequence."""
    full = Runner(model, model.new_cache(600), 64)
    sequence = TokenSequence(torch.randint(0, 267, (300,), generator=torch.Generator().manual_seed(0)).tolist())
    list(full.prefill(sequence))
    middle = SelectedRunner(full, selected_cache(full.cache, SETTINGS))
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


def test_fixed_shapes_give_the_rows_of_growing_ones(model):
    recorded = []
    found, expected = (decode(model, record) for record in (lambda run: recorded.append(run) or run, None))
    assert recorded
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_graphs_give_the_rows_of_growing_shapes(tmp_path):
    make_hf_model("llama").save_pretrained(tmp_path)
    on_gpu = torch.device("cuda", 0)
    model = load_model(FolderCheckpoint(tmp_path), torch.bfloat16, on_gpu, lambda done, total: None, TorchOperations())
    found = decode(model, None)  # recorded, because it is a GPU
    _full, middle, sequence = runners(model)
    middle.graphs = None
    torch.testing.assert_close(found[0], middle.rows(sequence, [5]), rtol=0.05, atol=0.05)
