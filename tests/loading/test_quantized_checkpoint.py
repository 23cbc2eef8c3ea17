"""Checkpoints that are quantised as they are read, against the same weights dequantised."""

import pytest
import torch

from offload.architecture.weight_formats import rounded_bits
from offload.errors import SettingsError
from offload.kernels.native import KernelUnavailable
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.quantization_checks import check_quantize
from offload.loading.weights import load_model
from offload.settings.config import EngineConfig
from tests.support.models import ids, make_hf_model
from tests.support.native_kernel import distance

CPU = torch.device("cpu")
LEVELS = ["q4", "q6"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model with rows that 6-bit blocks fit, and a head of its own."""
    folder = tmp_path_factory.mktemp("wide")
    make_hf_model("llama", intermediate_size=256, tie_word_embeddings=False).save_pretrained(folder)
    return FolderCheckpoint(folder)


def load(checkpoint, dtype, operations):
    return load_model(checkpoint, dtype, CPU, lambda done, total: None, operations)


def logits(model, prompt):
    return model.logits(model.forward(torch.tensor(prompt), model.new_cache(len(prompt))))


@pytest.mark.parametrize("level", LEVELS)
def test_the_kernel_computes_with_the_rounded_weights(checkpoint, native_operations, level):
    quantized = checkpoint.rounded(level)
    model = load(quantized, torch.bfloat16, native_operations)
    expected = logits(load(quantized, torch.float32, TorchOperations()), ids(40)).double()
    assert distance(logits(model, ids(40)), expected) < 0.02
    assert model._layers[0].down.tensors()[0].dtype == torch.uint8
    in_full = logits(load(checkpoint, torch.float32, TorchOperations()), ids(40))
    assert distance(in_full, expected) > 0.002  # the weights were rounded


def test_each_tensor_has_its_format_and_its_parts_are_those_of_the_whole(checkpoint):
    quantized = checkpoint.rounded("q6")
    formats = {name: weight.kind.name for name, weight in quantized.weights.items() if weight.is_quantized}
    assert formats["model.layers.0.mlp.down_proj.weight"] == "Q6_K"
    assert formats["model.layers.0.mlp.up_proj.weight"] == formats["lm_head.weight"] == "Q8_0"
    assert len(formats) == 7 * 2 + 2  # no norms
    weight, part = quantized.weights["model.layers.0.self_attn.o_proj.weight"], (slice(None), slice(16, 48))
    assert torch.equal(weight.read(part), weight.quantized().dequantized()[part])  # which cuts groups of 32
    norms = [each.weights["model.norm.weight"] for each in (quantized, checkpoint)]
    assert norms[0].quantized() is None and torch.equal(norms[0].read(), norms[1].read())


def test_it_needs_bf16_and_the_native_kernel(monkeypatch):
    def missing(level):
        raise KernelUnavailable("no compiler")

    config = EngineConfig(quantize="q4")
    with pytest.raises(SettingsError, match="the dtype is float16"):
        check_quantize(config, torch.device("cuda"), torch.float16)
    monkeypatch.setattr("offload.loading.quantization_checks.find_kernel", missing)
    with pytest.raises(SettingsError, match="no native kernel: no compiler"):
        check_quantize(config, CPU, torch.bfloat16)


@pytest.mark.parametrize("level", LEVELS)
def test_bits_from_dimensions_alone_are_those_of_the_tensors(checkpoint, level):
    quantized, size = checkpoint.rounded(level), {True: 0, False: 0}
    bits = dict(size)
    for name, shape in checkpoint.sizes().items():
        if name in (stored := quantized.quantized_bits()):
            count, in_layer = shape[0] * shape[1], ".layers." in name
            size[in_layer] += count
            bits[in_layer] += count * stored[name]
    found = rounded_bits(checkpoint.shape, level)
    assert (found.layers, found.outer) == pytest.approx((bits[True] / size[True], bits[False] / size[False]))
