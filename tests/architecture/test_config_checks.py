"""Configs that no model can have, refused by name; unusual ones of real models, read."""

import time

import pytest

from offload.architecture.rope import check_frequencies
from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from tests.support.checkpoints import edit_config
from tests.support.models import make_hf_model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM"),
        ({"model_type": "made_up", "architectures": None}, "made_up"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"model_type": "gpt2", "architectures": "GPT2"}, "architecture GPT2 "),
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "part of each",
        ),
    ],
)
def test_what_does_not_run_is_refused_by_name(llama_dir, changes, words):
    edit_config(llama_dir, **changes)
    with pytest.raises(UnsupportedModel, match=words) as caught:
        FolderCheckpoint(llama_dir)
    assert caught.value.hint


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
def test_impossible_numbers_are_refused_by_name(llama_dir, changes):
    edit_config(llama_dir, **changes)
    ((name, value),) = changes.items()
    with pytest.raises(CheckpointError, match=f"{name} is ") as caught:
        FolderCheckpoint(llama_dir)
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
def test_rope_nonsense_is_refused_by_name(llama_dir, rope, changes):
    edit_config(llama_dir, **(changes if "rope_parameters" in changes else {"rope_parameters": rope | changes}))
    ((name, _),) = changes.items()
    with pytest.raises(CheckpointError, match=f"{name} is ") as caught:
        FolderCheckpoint(llama_dir)
    assert "not" in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_rope_parameter_is_named(llama_dir, name):
    edit_config(llama_dir, rope_parameters={key: value for key, value in LLAMA3.items() if key != name})
    with pytest.raises(CheckpointError, match=f"llama3 without {name}"):
        FolderCheckpoint(llama_dir)


def test_rope_that_only_together_is_impossible(llama_dir):
    """A dynamic base grows with an exponent of dim / (dim - 2)."""
    edit_config(llama_dir, rope_parameters=FACTOR | {"rope_type": "dynamic"}, head_dim=2)
    with pytest.raises(CheckpointError, match=r"dynamic.*do not work"):
        check_frequencies(FolderCheckpoint(llama_dir).shape)
    edit_config(llama_dir, rope_parameters=LONGROPE | {"long_factor": [2.0] * 7}, head_dim=16)
    with pytest.raises(CheckpointError, match="long_factor has 7 numbers"):
        check_frequencies(FolderCheckpoint(llama_dir).shape)


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
def test_unusual_configs_of_real_models_are_read(llama_dir, changes):
    edit_config(llama_dir, **changes)
    checkpoint = FolderCheckpoint(llama_dir)
    check_frequencies(checkpoint.shape)
    assert checkpoint.shape.eos_ids in ((2,), ())


@pytest.mark.long
def test_keys_that_the_decoder_does_not_read_cost_nothing(llama_dir):
    edit_config(llama_dir, num_labels=10**9)  # transformers would make a name for each
    began = time.process_time()
    check_tensors(FolderCheckpoint(llama_dir))
    assert time.process_time() - began < 1


@pytest.mark.parametrize("ids", [267, [267, 50000]])
def test_an_end_that_cannot_be_drawn_is_refused(llama_dir, ids):
    (llama_dir / "generation_config.json").unlink()
    edit_config(llama_dir, eos_token_id=ids)
    with pytest.raises(CheckpointError, match="eos_token_id is 267, and the vocabulary has 267 tokens"):
        FolderCheckpoint(llama_dir)


def test_sliding_window_bounds_the_context(tmp_path):
    make_hf_model("mistral", sliding_window=100).save_pretrained(tmp_path)
    assert FolderCheckpoint(tmp_path).shape.context == 100
