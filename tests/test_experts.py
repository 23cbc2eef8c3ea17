"""Mixtures of experts: who computes what, in which bits, and what a pass reads of them."""

import json
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offload.architecture.dims import WeightBits
from offload.architecture.families import FAMILIES
from offload.architecture.hf_config import shape_from_config
from offload.architecture.layer_spec import LayerSpec, expected_experts
from offload.errors import CheckpointError, UnsupportedModel
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.stacked_experts import expert_weights
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.weights import load_model
from offload.model.experts import ExpertWeights
from offload.model.layer import LayerPass
from offload.parallel import ALONE
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.models import FAMILY_CASES, id_tensor, make_hf_model
from tests.support.offloading import CPU, make_link, native_kernel

needs_kernel = pytest.mark.skipif(not native_kernel(), reason="no kernel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    make_hf_model(*FAMILY_CASES["qwen3-moe"][:1], **FAMILY_CASES["qwen3-moe"][1]).save_pretrained(path)
    return path


def load(checkpoint, operations=None, dtype=torch.float32, tier=None):
    return load_model(checkpoint, dtype, CPU, lambda done, total: None, operations or TorchOperations(), tier)


@needs_kernel
@pytest.mark.parametrize(("name", "level"), [("qwen3-moe", "q4"), ("gpt-oss", None)])
def test_a_token_has_the_same_bits_whatever_rows_are_beside_it(folder, tmp_path, name, level):
    if name != "qwen3-moe":
        family, changes = FAMILY_CASES[name]
        make_hf_model(family, **changes).save_pretrained(folder := tmp_path)
    checkpoint = FolderCheckpoint(folder)
    checkpoint = checkpoint if level is None else checkpoint.rounded(level)
    model = load(checkpoint, NativeOperations(native_kernel()), torch.bfloat16)
    whole = model.forward(id_tensor(40), model.new_cache(40))
    cache = model.new_cache(40)
    parts = [model.forward(part, cache).clone() for part in id_tensor(40).split([1, 17, 1, 21])]
    assert torch.equal(torch.cat(parts), whole)


def test_layers_that_differ_are_not_streamed(tmp_path):
    family, changes = FAMILY_CASES["qwen3-moe-mixed"]
    make_hf_model(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="layers differ"):
        load(FolderCheckpoint(tmp_path), tier=WeightTier(0, make_link()))


def test_the_expected_number_of_experts_is_that_of_all_choices():
    choices = list(combinations(range(4), 2))
    for tokens in (1, 2, 3):
        counts = [len(set().union(*each)) for each in product(choices, repeat=tokens)]
        assert expected_experts(4, 2, tokens) == pytest.approx(sum(counts) / len(counts))


def test_what_a_pass_reads_is_what_was_planned(folder):
    model, bits = load(FolderCheckpoint(folder)), WeightBits.of_dtype(4)
    for tokens in (1, 3, 100):
        assert model.read_cost_of(tokens) == pytest.approx(model.shape.read_bytes(bits, tokens), rel=0.01)
    stored = sum(tensor.nbytes for layer in model.layers() for tensor in layer.experts.tensors())
    assert stored == 2 * 4 * (8 * model.shape.expert_parameters + 8 * 64)  # two layers in fp32: experts and router
    assert model.read_cost == model.read_cost_of(1) < 0.7 * model.read_cost_of(100)


CONFIG = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 267}
CONFIG |= {"num_attention_heads": 4, "num_hidden_layers": 6, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, not at most the number of experts, 8"),
        ({"num_experts": "8"}, "num_experts is"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ],
)
def test_wrong_numbers_of_experts_are_named(change, match):
    with pytest.raises(CheckpointError, match=match):
        shape_from_config(CONFIG | {"num_experts": 8} | change, {})


def test_layers_without_experts_are_dense():
    config = CONFIG | {"decoder_sparse_step": 2}
    shape = shape_from_config(config | {"mlp_only_layers": [3]}, {})
    assert [spec.is_sparse for spec in shape.specs] == [False, True, False, False, False, True]
    assert (shape.experts.layers, shape.layers) == (2, 6)
    assert shape_from_config(config | {"num_experts": 0}, {}).experts is None


def gpt_oss():
    """Return transformers' experts of a tiny gpt-oss, and ours, read from its tensors under the file's names."""
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    theirs = make_hf_model("gpt_oss", num_hidden_layers=1, **settings).model.layers[0].mlp
    family = replace(FAMILIES["llama"], stacked=GPT_OSS, transposes_experts=True, interleaves_experts=True)
    tensors = {f"model.layers.0.mlp.{name}": weight.data for name, weight in theirs.named_parameters()}
    return theirs, expert_weights(family, {name: Held(tuple(x.shape), x) for name, x in tensors.items()})


class Held(NamedTuple):
    """A weight in memory."""

    size: tuple
    tensor: torch.Tensor

    def read(self, part=None):
        return self.tensor[part or ...]


GPT_OSS = {
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.gate_up_proj_bias": ("mlp.experts.*.gate_proj.bias", "mlp.experts.*.up_proj.bias"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
    "mlp.experts.down_proj_bias": ("mlp.experts.*.down_proj.bias",),
}


def test_experts_of_gpt_oss_have_clamped_gates_and_biases():
    theirs, weights = gpt_oss()
    do, at = TorchOperations(), "model.layers.0.mlp"

    def linear(*names):
        stored = [[f"{at}.{name}.{kind}" for name in names] for kind in ("weight", "bias")]
        assert all(weights[name].size == weights[name].read().shape for each in stored for name in each)
        return do.linear(*(torch.cat([weights[name].read() for name in each]) for each in stored))

    experts = ExpertWeights(
        router=linear("router"),
        gate_up=tuple(linear(f"experts.{i}.gate_proj", f"experts.{i}.up_proj") for i in range(4)),
        down=tuple(linear(f"experts.{i}.down_proj") for i in range(4)),
        per_token=2,
        group=ALONE,
    )
    layer = LayerPass(LayerSpec(router="chosen", router_bias=True, swiglu_limit=7.0), None, do)
    x = 9 * torch.randn(11, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = theirs(x[None])[0][0], experts.mixed(x, layer.spec, layer.activated)
        inner = experts.gate_up[0](x)
    assert inner.abs().max() > 8, "nothing is clamped"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_more_experts_than_the_config_says_are_refused(tmp_path):
    family, changes = FAMILY_CASES["mixtral"]
    make_hf_model(family, num_hidden_layers=1, **changes).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    with pytest.raises(CheckpointError, match="4 experts, its config says 3"):
        check_tensors(FolderCheckpoint(tmp_path))


def test_a_checkpoint_in_mxfp4_gives_the_logits_of_its_dequantised_weights(tmp_path):
    family, changes = FAMILY_CASES["gpt-oss"]
    reference, random = make_hf_model(family, **changes).eval(), torch.Generator().manual_seed(0)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, (name, rows, groups) in product((0, 1), (("gate_up_proj", 64, 2), ("down_proj", 64, 1))):
        blocks = torch.randint(0, 256, (4, rows, groups, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(122, 125, (4, rows, groups), dtype=torch.uint8, generator=random)
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        getattr(reference.model.layers[layer].mlp.experts, name).data.copy_(whole)
        stored = f"model.layers.{layer}.mlp.experts.{name}"
        del tensors[stored]
        tensors |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint, ids = FolderCheckpoint(tmp_path), id_tensor(40)
    check_tensors(checkpoint)
    model = load(checkpoint)
    with torch.inference_mode():
        expected = reference(ids[None], use_cache=False).logits[0]
    assert (model.logits(model.forward(ids, model.new_cache(40))) - expected).abs().max() < 1e-4
    if native_kernel():  # in bf16 the experts stay quantised, and nothing else
        layer = next(load(checkpoint, NativeOperations(native_kernel()), torch.bfloat16).layers())
        assert layer.experts.down[0].tensors()[0].dtype == torch.uint8
        assert {tensor.dtype for tensor in layer.experts.router.tensors()} <= {torch.bfloat16, torch.float32}
