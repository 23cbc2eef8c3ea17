"""Every family against transformers, on torch and on the native kernel, and every method against plain decoding."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
)

from offload import GenerationConfig, Speculation, Tokens
from offload.architecture.families import FAMILIES
from offload.architecture.hf_config import read_shape, shape_from_config
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import CheckpointError, SettingsError, UnsupportedModel
from offload.kernels.native.ops import NativeOperations, why_not
from offload.kernels.ops import TorchOperations, choose_operations
from offload.loading.formats.gguf import GGUFCheckpoint
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.weights import load_model
from offload.prompt_cache.fingerprint import fingerprint
from tests.support.engine import GREEDY, run, tokens
from tests.support.gguf import write_family
from tests.support.models import FAMILY_CASES, id_tensor, ids, make_hf_model
from tests.support.offloading import native_kernel, settings, tiered_cache

CPU = torch.device("cpu")
IDS = id_tensor(150) % 266
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 267, "max_position_embeddings": 512}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN = {"hidden_size_per_layer_input": 0}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PARTIAL_WINDOWS = {
    name: {"full_attention": {"rope_type": kind, "rope_theta": 1e4}, "sliding_attention": _PARTIAL}
    for name, kind in (("gemma3", "default"), ("gemma4", "proportional"))
}
NO_GGUF = ("phi3-long", "qwen3-moe-mixed", "olmo3")  # factors stored as tensors, no dense layers, no windows
NO_GGUF += ("ministral", "ministral3", "gemma4", "gemma4-large")  # written as others
NO_GGUF += ("qwen3-next", "qwen3.5", "qwen3.5-moe", "glm4-flash")  # linear attention, or another family's files


ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {
    "linear": {"rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_theta": 10000.0, "factor": 2.0},
    "yarn": ROPE,
    "llama3": ROPE | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": ROPE
    | {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2 + 0.5 * i for i in range(8)]},
}
LLAMAS = {  # of the families without a case of their own, and every RoPE type; not written as GGUF
    "llama-mha-untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-own-head-dim": ("llama", {"head_dim": 48}),
    "qwen2": ("qwen2", {}),
    "seed-oss-biased": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "qwen3-biased": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    **{kind: ("llama", {"rope_parameters": {"rope_type": kind} | more}) for kind, more in SCALED.items()},
}
CASES = FAMILY_CASES | LLAMAS


def load(checkpoint, native, dtype=torch.float32):
    check_tensors(checkpoint)
    operations = NativeOperations(native_kernel()) if native else TorchOperations()
    return load_model(checkpoint, dtype, CPU, lambda done, total: None, operations)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The name of a case, transformers' model, the folder where it is, and its logits for IDS."""
    family, changes = CASES[request.param]
    reference, folder = make_hf_model(family, **changes).eval(), tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    with torch.inference_mode():
        expected = reference(IDS[None], use_cache=False).logits[0]
    assert expected.std() > 0.05, "the comparison would mean nothing"
    return request.param, reference, folder, expected


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.skipif(not native_kernel(), reason="no kernel"))])
def native(request):
    return request.param


def test_logits_are_those_of_transformers_whole_chunked_and_decoded(case, native):
    *_, folder, expected = case
    model = load(FolderCheckpoint(folder), native)
    whole, cache = model.logits(model.forward(IDS, model.new_cache(len(IDS)))), model.new_cache(len(IDS))
    parts = [model.logits(model.forward(part, cache)) for part in (*IDS[:140].split(33), *IDS[140:].split(1))]
    assert (whole - expected).abs().max() < 1e-4
    assert (torch.cat(parts) - expected).abs().max() < 1e-4
    if native:
        assert torch.equal(torch.cat(parts), whole)
        if model.shape.caps_scores:
            with pytest.raises(SettingsError, match="cannot be offloaded"):
                tiered_cache(model, settings())
            return
        tiers = tiered_cache(model, settings())
        assert (model.logits(model.forward(IDS, tiers)) - expected).abs().max() < 1e-4


def test_methods_are_greedy_equal_to_plain_decoding(case):
    name, _, folder, _ = case
    if name not in ("smollm3", "gemma2", "gemma4", "gpt-oss", "qwen3.5", "ministral3", "deepseek-v3"):
        pytest.skip("the caches know nothing of families but which layers have windows, states and RoPE")
    model = load(FolderCheckpoint(folder), native_kernel() is not None)
    engine, found = Engine(model, (), 32, model), {}  # it is its own draft model
    for method in ("ar", "lookup", "triforce"):
        found[method] = tokens(run(engine, ids(50), 8, method, "model", gamma1=2, gamma2=3))
    assert set(map(tuple, found.values())) == {tuple(found["ar"])}


@pytest.mark.skipif(not native_kernel(), reason="no kernel")
@pytest.mark.parametrize("name", ["gpt-oss", "gemma4", "deepseek-v3"])
def test_sequences_of_a_batch_have_windows_and_positions_of_their_own(tmp_path, name):
    family, changes = FAMILY_CASES[name]
    make_hf_model(family, **changes).save_pretrained(tmp_path)
    engine = Engine(load(FolderCheckpoint(tmp_path), True), (), 32)
    config, methods = GenerationConfig(max_new_tokens=6), ("ar", "retrieval", "lookup")
    prompts = {method: ids(40 + at, seed=at) for at, method in enumerate(methods)}
    requests = [BatchRequest(name, some, GREEDY, config, Speculation(name)) for name, some in prompts.items()]
    found = {name: [] for name in methods}
    for name, event in engine.generate_batch(requests, 3):
        found[name] += event.ids if isinstance(event, Tokens) else ()
    assert found == {name: tokens(run(engine, some, 6, "ar")) for name, some in prompts.items()}


def test_gguf_files_give_the_same_logits(case, tmp_path):
    name, reference, _, expected = case
    if name in (*NO_GGUF, *LLAMAS):
        pytest.skip("refused")
    write_family(tmp_path / "model.gguf", reference)
    model = load(GGUFCheckpoint(tmp_path / "model.gguf"), False)
    found = model.logits(model.forward(IDS, model.new_cache(len(IDS))))
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.skipif(not native_kernel(), reason="no kernel")
def test_quantised_weights_stay_quantised_in_the_right_order(case, tmp_path):
    name, reference, _, _ = case
    if name in (*NO_GGUF, *LLAMAS):
        pytest.skip("refused")
    write_family(tmp_path / "model.gguf", reference, GGMLQuantizationType.Q8_0)
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    exact, model = load(checkpoint, False), load(checkpoint, True, torch.bfloat16)
    assert all(tensor.dtype == torch.uint8 for tensor in next(model.layers()).o.tensors() if tensor.dim() > 1)
    found, expected = (each.logits(each.forward(IDS[:40], each.new_cache(40))) for each in (model, exact))
    assert (found - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("smollm3", {"use_sliding_window": True, "sliding_window": 64}, "sliding windows"),
        ("cohere", {"use_qk_norm": True}, "norms of q and k"),
        ("starcoder2", {"hidden_act": "relu"}, "relu"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE type 'linear'"),
        ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 8}, "experts beside the MLP"),
        ("gemma4_text", {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input"),
        ("gemma4_text", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}} | PLAIN, "RoPE type 'linear'"),
        ("gemma4_text", {"per_layer_config": {"00": {"head_dim": 64}}} | PLAIN, "single layers"),
        ("gemma4_text", {"num_kv_shared_layers": 1} | PLAIN, "a layer of each kind"),
        ("gemma4_text", {"use_bidirectional_attention": True} | PLAIN, "both directions"),
        ("gemma4_text", {"rope_parameters": PARTIAL_WINDOWS["gemma4"]} | PLAIN, "layers with a window"),
        ("gemma3_text", {"rope_parameters": PARTIAL_WINDOWS["gemma3"]}, "layers with a window"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "sigmoids"),
        ("deepseek_v3", {"kv_lora_rank": 33}, "latents of 33 numbers"),
        ("gpt_oss", {"swiglu_alpha": 2.0, "num_key_value_heads": 2}, "swiglu_alpha"),
    ],
)
def test_variants_that_are_not_computed_are_refused_by_name(family, change, match, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | SIZES | change))
    with pytest.raises(UnsupportedModel, match=match):
        read_shape(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("olmo2", lambda writer: writer.add_sliding_window(16), "sliding windows"),  # OLMo 3
        ("glm4", lambda writer: writer.add_rope_dimension_sections([8, 12, 12, 0]), "several axes"),  # GLM-4V
        ("glm4", lambda writer: writer.add_nextn_predict_layers(1), "further tokens"),  # GLM-OCR
        ("granite", lambda writer: writer.add_rope_scaling_finetuned(False), "finetuned false"),
        ("olmoe", lambda writer: writer.add_clamp_kqv(8.0), "clamp_kqv"),
        ("qwen3", lambda writer: writer.add_causal_attention(False), "both directions"),
        ("olmo2", lambda writer: writer.add_array("olmo2.attention.head_count_kv", [2, 1]), "differ in their sizes"),
    ],
)
def test_gguf_files_of_variants_that_are_not_computed_are_refused_by_name(family, change, match, tmp_path):
    write_family(tmp_path / "model.gguf", make_hf_model(family, num_hidden_layers=1), change=change)
    with pytest.raises(UnsupportedModel, match=match):
        GGUFCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["attn_q_norm.weight", "attn_output.bias", "attn_q.scale"])  # Command-R+ has the first
def test_gguf_files_with_a_tensor_that_is_not_used_are_refused_by_its_name(name, tmp_path):
    name = f"blk.0.{name}"
    model = make_hf_model("cohere", num_hidden_layers=1)
    write_family(tmp_path / "model.gguf", model, change=lambda writer: writer.add_tensor(name, np.ones(64, np.float32)))
    with pytest.raises(UnsupportedModel, match=name):
        GGUFCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("family", "change", "name"),
    [
        ("smollm3", {"no_rope_layers": [1, "x"]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("granite", {"residual_multiplier": "0.2"}, "residual_multiplier"),
        ("starcoder2", {"norm_epsilon": -1.0}, "rms_norm_eps"),
        ("starcoder2", {"use_bias": "yes"}, "attention_bias"),
        ("phi3", {"partial_rotary_factor": 0.01, "eos_token_id": 2}, "partial_rotary_factor"),
    ],
)
def test_wrong_values_are_named(family, change, name):
    with pytest.raises(CheckpointError, match=name):
        shape_from_config({"model_type": family} | SIZES | change, {})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"head_dim": None}),
        ("gemma4_text", {"head_dim": None}),
        ("gemma4_text", {"num_key_value_heads": None}),
        ("gemma4_text", {"head_dim": 17}),
    ],
)
def test_heads_that_a_family_cannot_have_are_refused_by_name(family, change, tmp_path):
    config = {"model_type": family} | SIZES | PLAIN | {"num_hidden_layers": 6} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f": {next(iter(change))} is "):
        read_shape(tmp_path / "config.json")


@pytest.mark.parametrize("change", [{"head_dim": 24}, {"hidden_size_per_layer_input": 24}])
def test_torch_computes_what_the_native_kernel_has_no_widths_for(change):
    family, changes = FAMILY_CASES["gemma4"]
    shape = shape_from_config({"model_type": family} | SIZES | changes | change, {})
    assert shape.head_dim == 32
    assert "24" in why_not(shape, torch.bfloat16, CPU)
    assert isinstance(choose_operations("auto", shape, torch.bfloat16, CPU), TorchOperations)


@pytest.mark.parametrize("name", ["qwen3.5-moe"])
def test_the_text_part_of_qwen3_5_loads_without_what_predicts_further_tokens(tmp_path, name):
    family, changes = FAMILY_CASES[name]
    text = make_hf_model(family, **changes).config.to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16}
    config = AutoConfig.for_model(family.removesuffix("_text"), text_config=text, vision_config=vision)
    torch.manual_seed(0)
    reference = AutoModelForImageTextToText.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(input_ids=IDS[None]).logits[0]
    save_file({"mtp.fc.weight": torch.zeros(4, 4)}, tmp_path / "model-mtp.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    places = dict.fromkeys(weights, "model.safetensors") | {"mtp.fc.weight": "model-mtp.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    checkpoint = FolderCheckpoint(tmp_path)
    assert checkpoint.skipped == 1 + sum("visual" in name for name in weights) > 5
    model = load(checkpoint, False)
    assert (model.logits(model.forward(IDS, model.new_cache(len(IDS)))) - expected).abs().max() < 1e-4
    assert read_shape(tmp_path / "config.json").parameters == model.shape.parameters


def test_a_layer_that_predicts_further_tokens_is_not_read_as_the_decoders_next_one(tmp_path):
    family, changes = FAMILY_CASES["glm4-moe"]
    reference = make_hf_model(family, **changes | {"num_mtp_layers": 1})
    write_family(tmp_path / "model.gguf", reference, change=lambda writer: writer.add_nextn_predict_layers(1))
    reference.config.num_hidden_layers = 2
    reference.save_pretrained(tmp_path)
    for checkpoint in (FolderCheckpoint(tmp_path), GGUFCheckpoint(tmp_path / "model.gguf")):
        check_tensors(checkpoint)
        assert checkpoint.shape.layers == 2


def test_the_text_part_of_gemma_4_loads(tmp_path):
    family, changes = FAMILY_CASES["gemma4"]
    text = make_hf_model(family, **changes).config.to_dict() | {"pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    torch.manual_seed(0)
    reference = Gemma4ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(input_ids=IDS[None]).logits[0]
    model = load(FolderCheckpoint(tmp_path), False)
    assert (model.logits(model.forward(IDS, model.new_cache(len(IDS)))) - expected).abs().max() < 1e-4
    shape = read_shape(tmp_path / "config.json")
    assert (shape.parameters, shape.kv_bytes(9, 2)) == (model.shape.parameters, model.shape.kv_bytes(9, 2))


def test_prompt_caches_tell_layers_apart(tmp_path):
    found = set()
    for scale in (0.4, 0.5):
        make_hf_model("granite", residual_multiplier=scale).save_pretrained(tmp_path)
        model = load(FolderCheckpoint(tmp_path), False)
        found.add(fingerprint(model, model.new_cache(64), 16, ""))
    assert len(found) == 2


def test_every_family_is_tested():
    tested = {family for family, _ in FAMILY_CASES.values()}
    assert tested | {"llama", "mistral", "qwen2", "qwen3"} == set(FAMILIES)
