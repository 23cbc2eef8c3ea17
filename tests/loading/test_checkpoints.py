"""Model files: what is read, and what is refused with which words."""

import json
import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import load_file, save_file

from offload.architecture.rope import check_frequencies
from offload.errors import CheckpointError, ModelNotFound, UnsupportedModel
from offload.loading.gguf import GGUFCheckpoint
from offload.loading.hub import _HUB_FILES, locate, open_checkpoint
from offload.loading.safetensors import FolderCheckpoint
from offload.loading.weights import check_tensors, expected_tensors, load_model
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)


@pytest.fixture
def folder(tmp_path):
    make_hf_model("llama", tie_word_embeddings=False).eval().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(checkpoint):
    check_tensors(checkpoint)
    model = load_model(checkpoint, torch.float32, CPU, lambda done, total: None)
    return model.logits(model.forward(IDS, model.new_cache(len(IDS))))


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_equal_one_file(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    whole = logits(FolderCheckpoint(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert torch.equal(logits(FolderCheckpoint(tmp_path / "sharded")), whole)


def test_missing_shard_is_named(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="60KB")
    lost = sorted(sharded.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        FolderCheckpoint(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_safetensors_is_found_before_loading(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match="corrupt or truncated"):
        check_tensors(FolderCheckpoint(folder))


def test_missing_and_misshapen_tensors_are_named(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(CheckpointError, match=name):
        check_tensors(FolderCheckpoint(folder))
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match="its config asks for"):
        check_tensors(FolderCheckpoint(folder))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM"),
        ({"model_type": "made_up", "architectures": None}, "made_up"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"model_type": "gpt2", "architectures": "GPT2"}, "architecture GPT2 "),
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "part of each",
        ),
    ],
)
def test_what_does_not_run_is_refused_by_name(folder, changes, words):
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=words) as caught:
        FolderCheckpoint(folder)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[" * 100_000),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [[2]]}'),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "x" * 1000}})),
        ("model.safetensors.index.json", '{"weight_map": {"a": "\\u0000"}}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": ""}}'),
        ("generation_config.json", '{"eos_token_id": -1}'),
        ("config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}"),
    ],
)
def test_damaged_json_is_told_as_such(folder, file, text):
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError):
        FolderCheckpoint(folder)


NAN, INFINITE = float("nan"), float("inf")
IMPOSSIBLE = [
    *({"num_hidden_layers": value} for value in (-1, 0, 10**7, 10**30, 2.5, "32", None, True, [2])),
    *({"hidden_size": value} for value in (0, -64, 10**12, "64")),
    *({"num_attention_heads": value} for value in (0, -4, 10**9, [4])),
    *({"num_key_value_heads": value} for value in (0, 3, -2, "2")),
    *({"head_dim": value} for value in (0, 15, -16, 10**9)),
    *({"vocab_size": value} for value in (0, 10**30, NAN)),
    *({"max_position_embeddings": value} for value in (0, -1, 10**30, INFINITE, "2048")),
    *({"rms_norm_eps": value} for value in (0, -1e-5, 1e308, NAN, INFINITE, "1e-5", None)),
    *({"eos_token_id": value} for value in (-1, 10**30, 2.0, "2", [2, -1], [[2]], {"id": 2}, True)),
    {"tie_word_embeddings": "no"},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_impossible_numbers_are_refused_by_name(folder, changes):
    edit_config(folder, **changes)
    ((name, value),) = changes.items()
    with pytest.raises(CheckpointError, match=f"{name} is ") as caught:
        FolderCheckpoint(folder)
    assert caught.value.hint and "\n" not in caught.value.message
    assert repr(value)[:10] in caught.value.message


FACTOR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = FACTOR | {
    "rope_type": "llama3",
    "original_max_position_embeddings": 512,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
}
YARN = FACTOR | {"rope_type": "yarn", "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "rope_theta": 1e4,
}
NONSENSE = [
    *(({"rope_theta": 1e4}, {"rope_theta": x}) for x in ("abc", "1e5", None, 0, -1e4, NAN, INFINITE, 1e300, [1e4], 1)),
    *((rope, {"factor": x}) for rope in (FACTOR, YARN, LLAMA3) for x in (0, -2, 1e300, "4", [4.0], NAN, True)),
    *((rope, {"original_max_position_embeddings": x}) for rope in (YARN, LLAMA3, LONGROPE) for x in (0, -1, "1", [1])),
    *((LLAMA3, {name: x}) for name in ("low_freq_factor", "high_freq_factor") for x in (0, -1, None, "1", [1])),
    (LLAMA3, {"low_freq_factor": 4}),
    *((YARN, {name: x}) for name in ("beta_fast", "attention_factor", "mscale") for x in (-1, "x", NAN, [1])),
    *((LONGROPE, {name: x}) for name in ("short_factor", "long_factor") for x in (8, "x", [], [0.0] * 8, ["x"] * 8)),
    ({}, {"rope_parameters": "linear"}),
    ({}, {"rope_parameters": ["linear", 2.0]}),
    ({}, {"rope_parameters": {"full_attention": FACTOR}}),
]


@pytest.mark.parametrize(("rope", "changes"), NONSENSE, ids=str)
def test_rope_nonsense_is_refused_by_name(folder, rope, changes):
    edit_config(folder, **(changes if "rope_parameters" in changes else {"rope_parameters": rope | changes}))
    ((name, _),) = changes.items()
    with pytest.raises(CheckpointError, match=f"{name} is ") as caught:
        FolderCheckpoint(folder)
    assert "not" in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_rope_parameter_is_named(folder, name):
    edit_config(folder, rope_parameters={key: value for key, value in LLAMA3.items() if key != name})
    with pytest.raises(CheckpointError, match=f"llama3 without {name}"):
        FolderCheckpoint(folder)


def test_rope_that_only_together_is_impossible(folder):
    """A dynamic base grows with an exponent of dim / (dim - 2)."""
    edit_config(folder, rope_parameters=FACTOR | {"rope_type": "dynamic"}, head_dim=2)
    with pytest.raises(CheckpointError, match=r"dynamic.*do not work"):
        check_frequencies(FolderCheckpoint(folder).shape)
    edit_config(folder, rope_parameters=LONGROPE | {"long_factor": [2.0] * 7}, head_dim=16)
    with pytest.raises(CheckpointError, match="long_factor has 7 numbers"):
        check_frequencies(FolderCheckpoint(folder).shape)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": YARN | {"factor": None}},  # then it is the ratio of both contexts
        {"rope_parameters": YARN | {"attention_factor": None, "beta_fast": None}},
        {"rope_parameters": FACTOR | {"rope_type": "default", "factor": "unused"}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 500000},
        {"num_key_value_heads": None, "head_dim": None, "eos_token_id": None},
        {"eos_token_id": [2, 50000]},  # inherited from a model with more tokens
        {"pad_token_id": -1},
    ],
    ids=str,
)
def test_unusual_configs_of_real_models_are_read(folder, changes):
    edit_config(folder, **changes)
    checkpoint = FolderCheckpoint(folder)
    check_frequencies(checkpoint.shape)
    assert checkpoint.shape.eos_ids in ((2,), ())


@pytest.mark.parametrize("layers", [10_000, 10**7, 10**30])
def test_a_number_of_layers_costs_no_time_before_it_is_checked(folder, layers):
    edit_config(folder, num_hidden_layers=layers)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 1000|lacks the tensor model\.layers\.2\."):
        check_tensors(FolderCheckpoint(folder))
    assert time.process_time() - began < 1


def test_keys_that_the_decoder_does_not_read_cost_nothing(folder):
    edit_config(folder, num_labels=10**9)  # transformers would make a name for each
    began = time.process_time()
    check_tensors(FolderCheckpoint(folder))
    assert time.process_time() - began < 1


def test_the_first_missing_tensor_ends_the_check(folder):
    shape = replace(FolderCheckpoint(folder).shape, layers=10**15)
    names = [name for name, _ in islice(expected_tensors(shape), 30)]
    assert names[0] == "model.embed_tokens.weight" and names[-1].startswith("model.layers.3.")


@pytest.mark.parametrize("ids", [267, [267, 50000]])
def test_an_end_that_cannot_be_drawn_is_refused(folder, ids):
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=ids)
    with pytest.raises(CheckpointError, match="eos_token_id is 267, and the vocabulary has 267 tokens"):
        FolderCheckpoint(folder)


def test_weights_in_whole_numbers_are_refused(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(UnsupportedModel, match=f"{name} is stored as I8"):
        check_tensors(FolderCheckpoint(folder))


def test_folder_without_config_or_weights(folder, tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="pickled"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(folder)


def test_sliding_window_bounds_the_context(tmp_path):
    make_hf_model("mistral", sliding_window=100).save_pretrained(tmp_path)
    assert FolderCheckpoint(tmp_path).shape.context == 100


def test_unknown_names(tmp_path):
    with pytest.raises(ModelNotFound) as caught:
        locate("smolm2-135m", tmp_path)
    assert "did you mean smollm2-135m" in caught.value.hint
    with pytest.raises(ModelNotFound):
        locate("missing.gguf", tmp_path)


def test_a_hub_model_is_taken_from_its_cache(folder, tmp_path, monkeypatch):
    from huggingface_hub import constants

    home = tmp_path / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abc")
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / "0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert locate("someone/tiny", tmp_path) == home / "snapshots" / "0123abc"


def test_only_one_copy_of_the_weights_is_asked_of_the_hub():
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    unwanted = ["consolidated.safetensors", "fp16/model.safetensors", "original/params.json", "pytorch_model.bin"]
    assert list(filter_repo_objects(wanted + unwanted, **_HUB_FILES)) == wanted


# GGUF ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_gguf_gives_the_dequantised_models_logits(folder, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kind = GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", model, kind)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:  # what the file holds, seen without our reader
                weight.copy_(torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind)))
            assert torch.isfinite(weight).all(), name
        expected = model(IDS[None]).logits[0]
    found = logits(open_checkpoint(tmp_path / "model.gguf"))
    assert (found - expected).abs().max() < 1e-4


def test_gguf_rope_divisors_are_applied(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    divisors = np.linspace(1, 4, model.config.head_dim // 2, dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.F32, extra=[("rope_freqs.weight", divisors)])
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq / torch.from_numpy(divisors))
    with torch.inference_mode():
        expected = model(IDS[None]).logits[0]
    assert (logits(GGUFCheckpoint(tmp_path / "model.gguf")) - expected).abs().max() < 1e-4


def test_gguf_is_known_by_its_first_bytes(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "blob", AutoModelForCausalLM.from_pretrained(folder), GGMLQuantizationType.F32)
    assert isinstance(open_checkpoint(tmp_path / "blob"), GGUFCheckpoint)


def test_gguf_of_another_architecture_is_refused(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.F32, architecture="gemma3")
    with pytest.raises(UnsupportedModel, match="gemma3"):
        GGUFCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("keep", [0, 10, 300, 0.5, 0.99])
def test_truncated_gguf_is_found_before_loading(folder, tmp_path, keep):
    from transformers import AutoModelForCausalLM

    path = tmp_path / "model.gguf"
    write_gguf(path, AutoModelForCausalLM.from_pretrained(folder), GGMLQuantizationType.F32)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError):
        check_tensors(GGUFCheckpoint(path))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = make_hf_model("llama", tie_word_embeddings=False)
    write_gguf(path, model, tokenizer=make_tokenizer(), rope={"factor": 4.0, "original_max_position_embeddings": 512})
    return path


@pytest.mark.parametrize(
    "field",
    [
        *("general.architecture", "llama.rope.scaling.type", "tokenizer.ggml.model", "tokenizer.ggml.tokens"),
        *("tokenizer.ggml.merges", "tokenizer.chat_template"),
    ],
)
def test_a_string_that_is_no_text_is_found_in_every_field(gguf, tmp_path, field):
    """transformers decodes all of them for the tokenizer, and this program some."""
    found = GGUFReader(gguf).fields[field]
    at = found.offset + sum(part.nbytes for part in found.parts[:-1])
    data = bytearray(gguf.read_bytes())
    data[at] = 0xFF
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"model\.gguf is corrupt: {field}.* is not UTF-8"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_a_damaged_length_is_no_endless_loop(gguf, tmp_path):
    found = GGUFReader(gguf).fields["tokenizer.ggml.token_type"]
    at = found.offset + sum(part.nbytes for part in found.parts[:4])
    data = bytearray(gguf.read_bytes())
    data[at : at + 8] = (2**60).to_bytes(8, "little")
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"corrupt: tokenizer\.ggml\.token_type ends beyond the file"):
        GGUFCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("llama.block_count", 10**7), ("llama.block_count", 0), ("llama.embedding_length", 0)),
        *(("llama.attention.head_count", 0), ("llama.attention.head_count_kv", 3), ("llama.context_length", 0)),
        *(("llama.attention.layer_norm_rms_epsilon", x) for x in (0.0, -1.0, NAN, 1e38)),
        *(("llama.rope.freq_base", x) for x in (0.0, -1.0, NAN, INFINITE)),
        *(("llama.rope.scaling.factor", x) for x in (0.0, -2.0, NAN, 1e38)),
        *(("llama.rope.scaling.original_context_length", 0), ("eos_token_id", 2**32 - 1)),
    ],
)
def test_impossible_metadata_is_refused_by_its_name(gguf, tmp_path, name, value):
    field = GGUFReader(gguf).fields[name if "." in name else f"tokenizer.ggml.{name}"]
    at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    data = bytearray(gguf.read_bytes())
    data[at : at + 4] = np.array([value], field.parts[-1].dtype).tobytes()
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is ") as caught:
        GGUFCheckpoint(tmp_path / "model.gguf")
    assert caught.value.hint


@pytest.mark.parametrize("divisors", [np.ones(7), np.zeros(8), np.full(8, NAN)], ids=["7", "zeros", "nan"])
def test_impossible_rope_divisors_are_refused(tmp_path, divisors):
    extra = [("rope_freqs.weight", divisors.astype(np.float32))]
    write_gguf(tmp_path / "model.gguf", make_hf_model("llama", tie_word_embeddings=False), extra=extra)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is .*not 8 positive numbers"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_tensors_that_are_not_one_after_the_other_are_refused(gguf, tmp_path):
    field = GGUFReader(gguf).tensors[3].field
    at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    data = bytearray(gguf.read_bytes())
    data[at] ^= 64
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="misplaced"):
        check_tensors(GGUFCheckpoint(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["abc", "blk.attn_q.weight", "a.b.c.d.attn_q.weight", "."])
def test_tensors_with_other_names_do_no_harm(tmp_path, name):
    model = make_hf_model("llama", tie_word_embeddings=False)
    write_gguf(tmp_path / "model.gguf", model, extra=[(name, np.ones(4, np.float32))])
    check_tensors(GGUFCheckpoint(tmp_path / "model.gguf"))


def test_yarn_without_an_original_context_is_taken_from_the_model_s(tmp_path):
    """0 is "not set", as llama.cpp writes it."""
    path = tmp_path / "model.gguf"
    model = make_hf_model("llama", tie_word_embeddings=False, max_position_embeddings=512)
    write_gguf(path, model, rope={"factor": 4.0, "original_max_position_embeddings": 0})
    assert GGUFCheckpoint(path).shape.context == 2048


@pytest.mark.parametrize("version", [1, 4])
def test_another_version_of_gguf_is_named(tmp_path, version):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_hf_model("llama", tie_word_embeddings=False))
    data = bytearray(path.read_bytes())
    data[4] = version
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=f"GGUF of version {version}"):
        GGUFCheckpoint(path)
