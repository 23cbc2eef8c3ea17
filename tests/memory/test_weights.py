"""Streamed weights give the model's output, whatever stays on the device."""

import time

import pytest
import torch

from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.link import TransferFailed
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.models import id_tensor, make_hf_model
from tests.support.offloading import CPU, make_link, native_kernel, random_delays

LENGTH = 60
needs_kernel = pytest.mark.skipif(native_kernel() is None, reason="no native kernel")


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def folder(request, tmp_path):
    make_hf_model(request.param, num_hidden_layers=4).save_pretrained(tmp_path)
    return tmp_path


def load(folder, operations, tier=None):
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None, operations, tier)


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_streamed_weights_give_the_same_rows(folder, operations, resident):
    whole = load(folder, operations)
    model = load(folder, operations, WeightTier(resident, make_link(before=random_delays(3))))
    caches = [each.new_cache(LENGTH) for each in (whole, model)]
    for part in id_tensor(LENGTH).split(17):
        expected, found = (each.forward(part, cache) for each, cache in zip((whole, model), caches, strict=True))
        assert torch.equal(found, expected)
    again = model.new_cache(LENGTH)
    list(model.forward_by_layers(id_tensor(LENGTH), again, 20))
    assert torch.allclose(again.store.read(0, LENGTH)[0], caches[0].store.read(0, LENGTH)[0], atol=1e-5)


def test_a_failed_copy_of_weights_raises_and_the_next_pass_is_right(folder, operations):
    seen, cable = [], ["loose"]

    def fail(pairs):  # also at the retry
        seen.append(pairs)
        if cable and len(seen) >= 3:
            raise OSError("the cable is loose")

    model = load(folder, operations, WeightTier(1, make_link(before=fail)))
    cache = model.new_cache(LENGTH)
    with pytest.raises(TransferFailed, match="the cable is loose"):
        model.forward(id_tensor(5), cache)
    assert cache.length == 0
    cable.clear()
    whole = load(folder, operations)
    assert torch.equal(model.forward(id_tensor(5), cache), whole.forward(id_tensor(5), whole.new_cache(LENGTH)))


def test_a_missing_wait_is_found(tmp_path, monkeypatch):
    make_hf_model("llama").save_pretrained(tmp_path)
    link = make_link(before=lambda pairs: time.sleep(0.02))
    monkeypatch.setattr(link, "wait", lambda ticket: None)
    model = load(tmp_path, TorchOperations(), WeightTier(0, link))
    assert model.forward(id_tensor(5), model.new_cache(9)).isnan().any()
