"""Models whose weights stay quantised in memory, against the same weights dequantised."""

import pytest
import torch
from gguf import GGMLQuantizationType

from offload.api.loader import open_model
from offload.kernels.ops import TorchOperations
from offload.kernels.quantized import StoredBlocks
from offload.loading.formats.gguf import GGUFCheckpoint
from offload.loading.weights import load_model
from offload.settings.config import EngineConfig
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.native_kernel import distance
from tests.support.offloading import native_kernel

CPU = torch.device("cpu")
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def logits(checkpoint, dtype, operations):
    model = load_model(checkpoint, dtype, CPU, lambda done, total: None, operations)
    ids = torch.arange(3, 43)
    return model.logits(model.forward(ids, model.new_cache(64))), model


@pytest.fixture(scope="module", params=KINDS)
def gguf(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / request.param / "model.gguf"
    path.parent.mkdir()
    model = make_hf_model("llama", tie_word_embeddings=request.param != "Q5_1")
    write_gguf(path, model, GGMLQuantizationType[request.param], tokenizer=make_tokenizer())
    return path


def test_logits_are_those_of_the_dequantised_weights(gguf, native_operations, monkeypatch):
    monkeypatch.delattr(StoredBlocks, "split")  # the kernel packs the file's blocks themselves
    found, model = logits(GGUFCheckpoint(gguf), torch.bfloat16, native_operations)
    expected, _ = logits(GGUFCheckpoint(gguf), torch.float32, TorchOperations())
    assert distance(found, expected.double()) < 0.02
    layer = model._layers[0]
    assert {linear.tensors()[0].dtype for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)} == {torch.uint8}


@pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")
def test_memory_is_estimated_from_the_bits_that_weights_take(gguf):
    opened = open_model(EngineConfig(model=str(gguf), device="cpu", dtype="bfloat16"))
    bits = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5}
    kind = gguf.parent.name
    assert opened.weight_bits.layers == opened.weight_bits.outer == bits[kind]
    weights = opened.load().model._layers[0].gate_up.tensors()[0].nbytes
    assert weights * 8 == 2 * opened.shape.intermediate * opened.shape.hidden * bits[kind]
    wide = open_model(EngineConfig(model=str(gguf), device="cpu", dtype="float32"))
    assert (wide.weight_bits.layers, wide.weight_bits.outer) == (32, 32)
    assert opened.estimate(64).parts["weights"] * 32 == pytest.approx(
        wide.estimate(64).parts["weights"] * bits[kind], rel=1e-3
    )
