"""Mixtures of experts: who computes what, in which bits, and what a pass reads of them."""

import json
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offload.architecture.families import FAMILIES
from offload.architecture.hf_config import shape_from_config
from offload.architecture.layer_spec import LayerSpec, expected_experts
from offload.architecture.parameters import WeightBits
from offload.errors import CheckpointError, UnsupportedModel
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.loading.formats.hf_quantization.stored import Header
from offload.loading.formats.quantization import QuantizedCheckpoint
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.stacked_experts import ExpertReader, expert_headers, expert_views, packed_bits
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.weights import load_model
from offload.model.experts import ExpertWeights, route
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


def by_token(experts, x, router):
    """Return what `mixed` does, one token and one expert at a time."""
    weights, chosen = route(experts.router.wide(x), experts.per_token, router)
    rows = []
    for row, theirs, numbers in zip(x, weights, chosen, strict=True):
        gate_up = (experts.gate_up[i](row[None]).clone().chunk(2, dim=1) for i in numbers)
        outs = [experts.down[i].wide(gate.silu() * up) for i, (gate, up) in zip(numbers, gate_up, strict=True)]
        rows.append(sum(weight * out[0] for weight, out in zip(theirs, outs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("router", ["all", "chosen"])
def test_each_token_gets_the_weighted_sum_of_its_experts(folder, router, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "silu", torch.nn.functional.silu, raising=False)
    do = TorchOperations()
    experts, x = next(load(FolderCheckpoint(folder)).layers()).experts, torch.randn(9, 64)
    torch.testing.assert_close(experts.mixed(x, router, do.gated), by_token(experts, x, router), atol=1e-5, rtol=1e-5)


def test_weights_are_a_softmax_over_all_experts_or_over_the_chosen():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    weights, experts = route(logits, 2, "all")
    assert experts.tolist() == [[1, 3]]
    assert torch.allclose(weights, logits.softmax(-1)[:, [1, 3]])
    assert torch.allclose(route(logits, 2, "chosen")[0], logits[:, [1, 3]].softmax(-1))


@needs_kernel
@pytest.mark.parametrize(("name", "level"), [("qwen3-moe", None), ("qwen3-moe", "q4"), ("gpt-oss", None)])
def test_a_token_has_the_same_bits_whatever_rows_are_beside_it(folder, tmp_path, name, level):
    if name != "qwen3-moe":
        family, changes = FAMILY_CASES[name]
        make_hf_model(family, **changes).save_pretrained(folder := tmp_path)
    checkpoint = FolderCheckpoint(folder)
    checkpoint = checkpoint if level is None else QuantizedCheckpoint(checkpoint, level)
    model = load(checkpoint, NativeOperations(native_kernel()), torch.bfloat16)
    whole = model.forward(id_tensor(40), model.new_cache(40))
    cache = model.new_cache(40)
    parts = [model.forward(part, cache).clone() for part in id_tensor(40).split([1, 17, 1, 21])]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("resident", [0, 1])
def test_streamed_experts_give_the_same_rows(folder, resident):
    checkpoint = FolderCheckpoint(folder)
    whole, model = load(checkpoint), load(checkpoint, tier=WeightTier(resident, make_link()))
    expected, found = (each.forward(id_tensor(30), each.new_cache(30)) for each in (whole, model))
    assert torch.equal(found, expected)


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


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, not at most the number of experts, 8"),
        ({"num_experts": "8"}, "num_experts is"),
        ({"num_local_experts": "8"}, "num_local_experts is"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ],
)
def test_wrong_numbers_of_experts_are_named(change, match):
    usual = {} if "num_local_experts" in change else {"num_experts": 8}
    with pytest.raises(CheckpointError, match=match):
        shape_from_config({"model_type": "qwen3_moe"} | usual | change, {})


def test_layers_without_experts_are_dense():
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2}
    shape = shape_from_config(config | {"mlp_only_layers": [3]}, {})
    assert [spec.is_sparse for spec in shape.specs] == [False, True, False, False, False, True]
    assert (shape.experts.layers, shape.dense_layers) == (2, 4)
    assert shape_from_config(config | {"num_experts": 0}, {}).experts is None


def test_a_tensor_that_is_no_list_of_matrices_is_refused(tmp_path):
    family, changes = FAMILY_CASES["granite-moe"]
    make_hf_model(family, num_hidden_layers=1, **changes).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.block_sparse_moe.input_linear.weight"
    tensors = load_file(file)
    for wrong in (tensors[name][0, 0], tensors[name][0], tensors[name][:, :-1].contiguous()):
        save_file(tensors | {name: wrong}, file)
        with pytest.raises(CheckpointError, match="not a list of matrices"):
            check_tensors(FolderCheckpoint(tmp_path))


def gpt_oss():
    """Return transformers' experts of a tiny gpt-oss, and ours, read from its tensors under the file's names."""
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    theirs = make_hf_model("gpt_oss", num_hidden_layers=1, **settings).model.layers[0].mlp
    family = replace(FAMILIES["llama"], stacked=GPT_OSS, transposes_experts=True, interleaves_experts=True)
    tensors = {f"model.layers.0.mlp.{name}": weight.data for name, weight in theirs.named_parameters()}
    headers = {name: Header("F32", tuple(weight.shape)) for name, weight in tensors.items()}
    views = expert_views(family, headers)
    return (
        theirs,
        expert_headers(views, headers),
        ExpertReader(lambda name, part=None: tensors[name][part or ...], views),
    )


GPT_OSS = {
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.gate_up_proj_bias": ("mlp.experts.*.gate_proj.bias", "mlp.experts.*.up_proj.bias"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
    "mlp.experts.down_proj_bias": ("mlp.experts.*.down_proj.bias",),
}


def test_experts_of_gpt_oss_have_clamped_gates_and_biases():
    theirs, headers, read = gpt_oss()
    do, at = TorchOperations(), "model.layers.0.mlp"

    def linear(*names):
        stored = [[f"{at}.{name}.{kind}" for name in names] for kind in ("weight", "bias")]
        assert all(headers[name].size == read(name).shape for each in stored for name in each)
        return do.linear(*(torch.cat([read(name) for name in each]) for each in stored))

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
        expected, found = theirs(x[None])[0][0], experts.mixed(x, "chosen", layer.activated)
        inner = experts.gate_up[0](x)
    assert inner.abs().max() > 8, "nothing is clamped"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_experts_in_mxfp4_are_those_of_transformers():
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(110, 130, (3, 8, 2), dtype=torch.uint8, generator=random)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, inputs, outputs]
    name = "model.layers.7.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    family = replace(FAMILIES["llama"], stacked=GPT_OSS, transposes_experts=True, interleaves_experts=True)
    views = expert_views(family, {name: Header("U8", tuple(x.shape)) for name, x in tensors.items()})
    read = ExpertReader(lambda name, part=None: tensors[name][part or ...], views)
    assert set(packed_bits(views).values()) == {4.5} and len(views) == 6
    for expert in range(3):
        for start, each in enumerate(("gate", "up")):
            ours = f"model.layers.7.mlp.experts.{expert}.{each}_proj.weight"
            assert (views[ours].rows, views[ours].columns) == (4, (64,))
            assert torch.equal(read.quantized(ours).dequantized(), expected[expert].T[start::2])
            assert torch.equal(read(ours, (slice(1, 3),)), expected[expert].T[start::2][1:3])


@pytest.mark.parametrize("scales", [None, Header("U8", (3, 8, 3)), Header("F32", (3, 8, 2))])
def test_codes_of_mxfp4_without_their_scales_are_refused(scales):
    name = "model.layers.0.mlp.experts.down_proj"
    headers = {f"{name}_blocks": Header("U8", (3, 8, 2, 16))} | ({f"{name}_scales": scales} if scales else {})
    with pytest.raises(CheckpointError, match="not MXFP4"):
        expert_views(replace(FAMILIES["llama"], stacked=GPT_OSS), headers)


@pytest.mark.parametrize("name", ["mixtral", "granite-moe"])
def test_more_experts_than_the_config_says_are_refused(tmp_path, name):
    family, changes = FAMILY_CASES[name]
    make_hf_model(family, num_hidden_layers=1, **changes).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    with pytest.raises(CheckpointError, match="4 experts in a layer, its config says 3"):
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
