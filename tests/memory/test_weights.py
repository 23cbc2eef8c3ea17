"""Streamed weights give the model's output, whatever stays on the device."""

import pytest
import torch

from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.link import TransferFailed
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.models import id_tensor, make_hf_model
from tests.support.offloading import CPU, make_link, native_kernel, random_delays

LENGTH = 60
needs_kernel = pytest.mark.skipif(native_kernel() is None, reason="no native kernel")


@pytest.fixture
def folder(tmp_path):
    make_hf_model("qwen2", num_hidden_layers=4).save_pretrained(tmp_path)
    return tmp_path


def load(folder, operations, tier=None):
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None, operations, tier)


@pytest.mark.parametrize("resident", [0, 3])
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


def test_interleaved_passes_do_not_disturb_each_other(folder, operations):
    """Prefills advance in turns, and one of them is closed early."""
    whole = load(folder, operations)
    model = load(folder, operations, WeightTier(1, make_link(before=random_delays(4))))
    prompts = [id_tensor(LENGTH, seed) for seed in range(4)]
    caches = [model.new_cache(LENGTH) for _ in prompts]
    passes = [model.forward_by_layers(*each, 20) for each in zip(prompts, caches, strict=True)]
    for _ in range(2):
        for each in passes:
            next(each)
    passes[1].close()
    for index in (0, 2, 3):
        list(passes[index])
        expected = whole.new_cache(LENGTH)
        whole.forward(prompts[index], expected)
        for found, wanted in zip(caches[index].store.read(0, LENGTH), expected.store.read(0, LENGTH), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert caches[1].length == 0
