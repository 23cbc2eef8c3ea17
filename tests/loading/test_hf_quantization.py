"""Checkpoints that other libraries have quantised, against the same weights in floating point."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.errors import CheckpointError, UnsupportedModel
from offload.kernels.ops import TorchOperations
from offload.loading.formats.hf_quantization import layouts
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.weights import load_model
from tests.support.checkpoints import edit_config
from tests.support.hf_quantization import (
    awq,
    float8,
    gptq,
    int_quantized,
    pack_quantized,
    write_quantized,
)
from tests.support.models import make_hf_model
from tests.support.native_kernel import distance

CPU = torch.device("cpu")
GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def compressed(form, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


# How a linear is quantised, the config, and the bits of a weight: 32 a scale, 32 a minimum, and the codes.
CASES = {
    "gptq": (gptq, GPTQ | {"sym": True}, 5),
    "gptq-group-64": (partial(gptq, group=64), GPTQ | {"sym": True, "lm_head": True}, 4.5),
    "gptq-zeros": (partial(gptq, symmetric=False, version=2), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, 6),
    "gptq-zeros-1": (partial(gptq, symmetric=False), GPTQ | {"sym": False}, 6),
    "gptq-8": (partial(gptq, bits=8, group=64), GPTQ | {"bits": 8, "sym": True}, 8.5),
    "awq": (awq, AWQ, 6),
    "int4": (pack_quantized, compressed("pack-quantized"), 5),
    "int4-zeros": (partial(pack_quantized, symmetric=False), compressed("pack-quantized"), 6),
    "int8-packed": (partial(pack_quantized, bits=8, group=64), compressed("pack-quantized"), 8.5),
    "int8": (int_quantized, compressed("int-quantized"), None),
    "int8-zeros": (partial(int_quantized, symmetric=False), compressed("int-quantized"), None),
    "fp8": (float8, FP8, None),
    "fp8-rows": (
        partial(float8, block=(1, 10**6), name="weight_scale", dtype=torch.bfloat16),
        compressed("float-quantized", type="float"),
        None,
    ),
    "fp8-tensor": (partial(float8, block=(10**6, 10**6)), FP8 | {"weight_block_size": None}, None),
}


def write(folder, case, skip=(), **changes):
    quantise, config, bits = CASES[case]
    sizes = {"vocab_size": 272, "hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": False}
    model = make_hf_model("llama", **sizes | changes)
    plain, values = write_quantized(folder, model, quantise, config, skip, head=config.get("lm_head", False))
    return FolderCheckpoint(folder), FolderCheckpoint(plain), values, bits


@pytest.fixture(scope="module", params=CASES)
def stored(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("stored") / request.param, request.param)


def logits(checkpoint, dtype, operations):
    check_tensors(checkpoint)
    model = load_model(checkpoint, dtype, CPU, lambda done, total: None, operations)
    ids = torch.arange(3, 43)
    return model.logits(model.forward(ids, model.new_cache(64))), model


def test_weights_are_those_of_the_formats_description(stored):
    checkpoint, plain, values, _ = stored
    assert checkpoint.is_quantized and checkpoint.sizes() == plain.sizes()
    with checkpoint.opened() as weights:
        for name, expected in values.items():
            assert torch.equal(weights[name].read(), expected), name
            kept = weights[name].quantized()
            assert (kept.dequantized() - expected).abs().max() <= 2**-22 * expected.abs().max(), name
            assert weights[name].bits == kept.format.bits_per_weight
        assert weights["model.embed_tokens.weight"].quantized() is None
        assert torch.equal(weights[name].read((slice(None), slice(16, 48))), values[name][:, 16:48])


def test_as_many_blocks_as_rows_are_not_taken_for_a_scale_of_each_row():
    codes, scales = torch.randn(256, 16384).to(torch.float8_e4m3fn), torch.rand(2, 128)
    stored = {"a.weight": Held("F8_E4M3", codes), "a.weight_scale_inv": Held("F32", scales)}
    ((_, matrix),) = layouts.float8(stored, (128, 128))
    expected = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(matrix.read(), expected)


class Held(NamedTuple):
    """A weight in memory."""

    dtype: str
    tensor: torch.Tensor

    @property
    def size(self):
        return tuple(self.tensor.shape)

    def read(self):
        return self.tensor


def test_logits_are_those_of_the_same_weights_in_floating_point(stored, native_operations):
    checkpoint, plain, _, bits = stored
    expected = logits(plain, torch.float32, TorchOperations())[0].double()
    assert distance(logits(checkpoint, torch.float32, TorchOperations())[0], expected) < 1e-6
    found, model = logits(checkpoint, torch.bfloat16, native_operations)
    assert distance(found, expected) < 0.02
    layer = model._layers[0]
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    assert {linear.tensors()[0].dtype for linear in linears} == {torch.uint8}
    assert all(len(linear.tensors()) == 1 for linear in linears)  # q, k and v are one linear
    if bits is not None:
        size = 2 * checkpoint.shape.intermediate * checkpoint.shape.hidden
        assert layer.gate_up.tensors()[0].nbytes * 8 == size * bits


@pytest.mark.parametrize("case", ["awq", "fp8"])
def test_modules_that_are_not_quantised_stay_as_they_are(tmp_path, case):
    checkpoint, plain, values, _ = write(
        tmp_path / case, case, skip=("layers.0.", "v_proj"), tie_word_embeddings=True, attention_bias=True
    )
    assert len(values) == 6
    expected = logits(plain, torch.float32, TorchOperations())[0].double()
    assert distance(logits(checkpoint, torch.float32, TorchOperations())[0], expected) < 1e-6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"quant_method": method}, method) for method in ("bitsandbytes", "torchao")),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq, packed as marlin"),
        (AWQ | {"version": "gemv"}, "awq, packed as gemv"),
        (FP8 | {"weight_block_size": [128]}, "fp8 in blocks of"),
        (compressed("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (compressed("dense") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (compressed("dense") | {"quantization_status": "frozen"}, "not compressed, or transformed"),
    ],
)
def test_other_formats_are_refused_by_name(llama_dir, settings, words):
    edit_config(llama_dir, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=words) as caught:
        FolderCheckpoint(llama_dir)
    assert "GGUF" in caught.value.hint


def change(folder, name, x):
    """Replace a tensor, or remove it."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if x is None else {name: x}), folder / "model.safetensors", {"format": "pt"})
    return FolderCheckpoint(folder)


def test_inputs_sorted_by_activation_are_refused(tmp_path):
    stem = "model.layers.0.mlp.up_proj"
    write(tmp_path / "gptq", "gptq", num_hidden_layers=1)
    order = torch.arange(128, dtype=torch.int32).flip(0) // 32
    with pytest.raises(UnsupportedModel, match="desc_act"):
        change(tmp_path / "gptq", f"{stem}.g_idx", order).sizes()


@pytest.mark.parametrize(
    ("case", "name", "x"),
    [
        ("gptq", "scales", torch.ones(3, 192).half()),
        ("gptq", "qzeros", torch.ones(4, 18, dtype=torch.int32)),  # 3 bits
        ("awq", "qzeros", torch.ones(3, 24, dtype=torch.int32)),
        ("int4", "weight_shape", torch.tensor([192, 100])),
        ("int4", "weight_scale", torch.ones(192, 3)),
        ("int8", "weight_scale", None),
        ("fp8", "weight_scale_inv", torch.ones(3, 1)),
        ("fp8", "weight_scale_inv", None),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_an_error(tmp_path, case, name, x):
    write(tmp_path / case, case, num_hidden_layers=1)
    with pytest.raises((CheckpointError, UnsupportedModel), match="up_proj"):
        change(tmp_path / case, f"model.layers.0.mlp.up_proj.{name}", x).sizes()
