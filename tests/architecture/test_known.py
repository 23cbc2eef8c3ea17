"""Dimensions of models without their weights: well-known names, and config.json read without transformers."""

import json
import subprocess
import sys

import pytest

from offload.architecture.config import shape_from_config
from offload.architecture.known import KNOWN, known_name, read_shape
from offload.errors import CheckpointError, ModelNotFound, UnsupportedModel
from offload.loading.hub import dimensions
from tests.support.models import CONFIGS

DIMENSIONS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "vocab",
    "tied_embeddings",
    "context",
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [
        ("Llama-2-7B-128K", 6.74, 512),
        ("Llama-2-13B-128K", 13.02, 800),
        ("LWM-Text-Chat-128K", 6.74, 512),
        ("Llama-3.1-8B", 8.03, 128),
        ("Llama-3.1-70B", 70.55, 320),
        ("Qwen2.5-7B-1M", 7.61, 56),
        ("Qwen3-8B", 8.19, 144),
        ("Mistral-Nemo", 12.25, 160),
        ("SmolLM2-135M", 0.1345, 22.5),
        ("Llama-68M", 0.068, 6),
        ("Llama-3.2-1B", 1.236, 32),
        ("Llama-3.2-3B", 3.213, 112),
        ("Qwen2.5-14B-1M", 14.77, 192),
        ("Qwen3-0.6B", 0.596, 112),
        ("Qwen3-4B-2507", 4.02, 144),
    ],
)
def test_known_models_have_their_published_sizes(name, billions, kv_kib):
    shape = KNOWN[name]
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert shape.kv_bytes(1, 2) == kv_kib * 1024
    assert shape.layers * shape.layer_kv_bytes(7, 2) == shape.kv_bytes(7, 2)
    assert shape.layers * shape.layer_parameters + shape.outer_parameters == shape.parameters


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("llama-2-7b-128k", "Llama-2-7B-128K"),
        ("NousResearch/Yarn-Llama-2-13b-128k", "Llama-2-13B-128K"),
        ("lwm text chat 128k", "LWM-Text-Chat-128K"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("LLAMA_3.1_70B", "Llama-3.1-70B"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "Qwen2.5-7B-1M"),
        ("qwen3-8b", "Qwen3-8B"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo"),
        ("smollm2-135m", "SmolLM2-135M"),
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B-2507"),
        ("JackFram/llama-68m", "Llama-68M"),
    ],
)
def test_names_are_forgiving(asked, name):
    assert known_name(asked) == name


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"rope_parameters": YARN},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_a_config_file_says_what_transformers_would(tmp_path, family, changes):
    settings = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    config = CONFIGS[family](**settings | changes)
    config.save_pretrained(tmp_path)
    ours, theirs = read_shape(tmp_path / "config.json"), shape_from_config(config.to_dict(), {})
    assert {name: getattr(ours, name) for name in DIMENSIONS} == {name: getattr(theirs, name) for name in DIMENSIONS}
    assert ours.parameters == theirs.parameters
    assert ours.kv_bytes(10, 2) == theirs.kv_bytes(10, 2)


def test_older_config_files(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = dimensions(str(tmp_path))
    assert (shape.kv_heads, shape.head_dim, shape.tied_embeddings, shape.context) == (4, 16, False, 32768)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", CheckpointError, "cannot read"),
        ("[]", CheckpointError, "not keys and values"),
        ('{"model_type": "gpt2"}', UnsupportedModel, "gpt2"),
        ('{"model_type": "llama", "hidden_size": "big"}', CheckpointError, "hidden_size is 'big'"),
        ('{"model_type": "llama", "hidden_size": 64}', CheckpointError, "num_attention_heads is None"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}', CheckpointError, "is 0"),
    ],
)
def test_config_files_that_do_not_work(tmp_path, text, error, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=message):
        dimensions(str(tmp_path))


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        dimensions(str(tmp_path))


def test_planning_imports_no_torch():
    code = (
        "import sys, offload.planning.plan, offload.planning.suggestions, offload.hardware.rates, offload.system;"
        "from offload.loading.hub import dimensions; dimensions('llama-3.1-8b');"
        "sys.exit(', '.join({'torch', 'typer', 'rich', 'transformers', 'triforce_cli'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("absent", ["num_key_value_heads", "head_dim"])
def test_absent_values_are_those_that_the_model_will_have(tmp_path, family, absent):
    config = {"model_type": family, "hidden_size": 512, "num_attention_heads": 64, "num_hidden_layers": 2}
    config |= {"intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 128}
    config |= {"num_key_value_heads": 64, "head_dim": 16}
    del config[absent]
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned, run = read_shape(tmp_path / "config.json"), shape_from_config(config, {})
    assert (planned.kv_heads, planned.head_dim) == (run.kv_heads, run.head_dim)
