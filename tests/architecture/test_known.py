"""Dimensions of models without their weights: well-known names, and config.json read without transformers."""

import json

import pytest

from offload.architecture.hf_config import read_shape
from offload.architecture.known_models import (
    KNOWN,
    VOCABULARIES,
    compatible,
    draft_for,
    known_name,
)
from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.hub.download import dimensions
from tests.support.paths import ROOT

# Parameters in billions, as the models' cards and reports say; of 1 token, the KiB of keys and values in bf16.
_PUBLISHED = """
Llama-2-7B 6.74 512; Llama-2-7B-128K 6.74 512; Llama-2-13B 13.02 800; Llama-2-13B-128K 13.02 800;
Llama-2-22B 21.83 1040; Llama-2-70B 68.98 320; LWM-Text-Chat-128K 6.74 512; LWM-Text-Chat-1M 6.74 512;
Vicuna-33B 32.53 1560; TinyLlama-1.1B 1.100 22; Sheared-LLaMA-1.3B 1.345 192; InternLM-7B 7.320 512;
InternLM-20B 20.09 1200; Llama-3.1-8B 8.03 128; Llama-3.1-70B 70.55 320; Llama-3.2-1B 1.236 32;
Llama-3.2-3B 3.213 112; Llama-3.3-70B 70.55 320; Qwen2.5-0.5B 0.494 12; Qwen2.5-1.5B 1.544 28;
Qwen2.5-3B 3.086 36; Qwen2.5-7B 7.616 56; Qwen2.5-14B 14.77 192; Qwen2.5-32B 32.76 256; Qwen2.5-72B 72.71 320;
Qwen2.5-7B-1M 7.616 56; Qwen2.5-14B-1M 14.77 192; DeepSeek-R1-Distill-Qwen-1.5B 1.777 28;
DeepSeek-R1-Distill-Qwen-7B 7.616 56; DeepSeek-R1-Distill-Qwen-14B 14.77 192;
DeepSeek-R1-Distill-Qwen-32B 32.76 256; DeepSeek-R1-Distill-Llama-8B 8.03 128;
DeepSeek-R1-Distill-Llama-70B 70.55 320; Qwen3-0.6B 0.596 112; Qwen3-1.7B 1.721 112; Qwen3-4B 4.022 144;
Qwen3-4B-2507 4.022 144; Qwen3-8B 8.191 144; Qwen3-14B 14.77 160; Qwen3-32B 32.76 256; Qwen3-30B-A3B 30.53 96;
Qwen3-235B-A22B 235.09 188; Qwen3-Next-80B-A3B 79.7 24; Mixtral-8x7B 46.70 128; Phi-4 14.66 200;
Phi-4-mini 3.836 128; Gemma-3-270M 0.268 18; Gemma-3-1B 1.0 26; Gemma-3-4B 3.88 136; Gemma-3-12B 11.77 384;
Gemma-3-27B 27.01 496; gpt-oss-20b 20.91 48; gpt-oss-120b 116.8 72; Mistral-7B 7.248 128; Mistral-Nemo 12.25 160;
Mistral-Small-24B 23.57 160; Mistral-Small-3.1-24B 23.57 160; GLM-4-9B-0414 9.40 40; GLM-4-32B-0414 32.57 61;
SmolLM3-3B 3.075 72; Granite-3.3-2B 2.534 80; Granite-3.3-8B 8.171 160; Yi-6B-200K 6.061 64;
Yi-34B-200K 34.39 240; SmolLM2-135M 0.1345 22.5; Llama-68M 0.068 6;
"""
PUBLISHED = {row.split()[0]: tuple(map(float, row.split()[1:])) for row in _PUBLISHED.split(";") if row.strip()}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_their_published_sizes(name):
    shape, (billions, kv_kib) = KNOWN[name], PUBLISHED[name]
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert shape.kv_bytes(1, 2) == kv_kib * 1024
    assert (shape.layers - shape.linear_layers) * shape.layer_kv_bytes(7, 2) == shape.kv_bytes(7, 2)
    assert shape.layers * shape.layer_parameters + shape.outer_parameters == shape.parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-30B-A3B", 3.34), ("Qwen3-235B-A22B", 22.2), ("Mixtral-8x7B", 12.9), ("Qwen3-8B", 8.2)],
)
def test_a_token_activates_the_published_number_of_parameters(name, billions):
    shape = KNOWN[name]
    assert shape.active_layer_parameters + shape.outer_parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert shape.read_parameters == shape.active_layer_parameters + shape.vocab * shape.hidden


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("NousResearch/Yarn-Llama-2-13b-128k", "Llama-2-13B-128K"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("lmsys/vicuna-33b-v1.3", "Vicuna-33B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("LLAMA_3.1_70B", "Llama-3.1-70B"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "Qwen2.5-7B-1M"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo"),
        ("smollm2-135m", "SmolLM2-135M"),
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B-2507"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen3-4B-2507"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B"),
        ("microsoft/Phi-4-mini-instruct", "Phi-4-mini"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B"),
        ("mistralai/Mistral-7B-Instruct-v0.1", None),  # has a window
        ("mistralai/Mistral-7B-v0.2", None),  # has a smaller vocabulary
        ("R1-Distill-Qwen-7B", "DeepSeek-R1-Distill-Qwen-7B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "DeepSeek-R1-Distill-Llama-8B"),
    ],
)
def test_names_are_forgiving(asked, name):
    assert known_name(asked) == name


def test_the_documentation_lists_all_of_them():
    lines = (ROOT / "docs" / "models.md").read_text("utf-8").splitlines()
    for name, models in VOCABULARIES.items():
        (line,) = [line for line in lines if line.startswith(f"| {name} | `")]
        draft = next(filter(None, map(draft_for, models)), None)
        assert line == f"| {name} | {', '.join(f'`{model}`' for model in models)} | {quoted(draft)} |"


def quoted(name):
    return f"`{name}`" if name else ""


def test_the_models_of_a_vocabulary_may_draft_for_each_other():
    assert sorted(name for models in VOCABULARIES.values() for name in models) == sorted(KNOWN)
    for models in VOCABULARIES.values():
        assert len({KNOWN[name].vocab // 1024 for name in models}) == 1  # but for padding
        assert all(compatible(one, other) for one in models for other in models)
    assert compatible("Qwen3-8B", "Qwen2.5-0.5B")
    assert not compatible("Llama-3.1-8B", "Llama-68M")
    assert compatible("DeepSeek-R1-Distill-Llama-70B", "Llama-3.2-1B")


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Llama-2-7B-128K", "Llama-68M"),
        ("Llama-3.1-8B", "Llama-3.2-1B"),
        ("Qwen2.5-7B-1M", "Qwen2.5-0.5B"),
        ("Qwen3-32B", "Qwen3-0.6B"),
        ("DeepSeek-R1-Distill-Qwen-14B", "DeepSeek-R1-Distill-Qwen-1.5B"),
        ("Qwen3-1.7B", None),  # a third of its weights
        ("Llama-68M", None),
        ("Phi-4", None),
    ],
)
def test_known_drafts_are_a_fraction_of_their_target(target, draft):
    assert draft_for(target) == draft


CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
CONFIG |= {"intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", CheckpointError, "cannot be read"),
        ("[]", CheckpointError, "does not hold a JSON object"),
        ('{"model_type": "gpt2"}', UnsupportedModel, "gpt2"),
        (json.dumps(CONFIG | {"hidden_size": "big"}), CheckpointError, "hidden_size is 'big'"),
    ],
)
def test_config_files_that_do_not_work(tmp_path, text, error, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=message):
        dimensions(str(tmp_path))


def test_a_plan_does_not_depend_on_tokens_that_end_an_answer(tmp_path):
    config = dict(CONFIG)
    config |= {"vocab_size": 100, "eos_token_id": 100}  # generation_config.json may name others
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path / "config.json").vocab == 100
