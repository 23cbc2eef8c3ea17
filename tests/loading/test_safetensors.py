"""Folders of safetensors: shards, and files that are truncated, damaged or lack tensors."""

import json
import time
from dataclasses import replace
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors, expected_tensors
from tests.support.checkpoints import edit_config, logits
from tests.support.models import make_hf_model


def test_shards_equal_one_file(llama_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    whole = logits(FolderCheckpoint(llama_dir))
    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert torch.equal(logits(FolderCheckpoint(tmp_path / "sharded")), whole)


def test_missing_shard_is_named(llama_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(llama_dir).save_pretrained(sharded, max_shard_size="60KB")
    lost = sorted(sharded.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        FolderCheckpoint(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_safetensors_is_found_before_loading(llama_dir, keep):
    file = llama_dir / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match="corrupt or truncated"):
        check_tensors(FolderCheckpoint(llama_dir))


def test_missing_and_misshapen_tensors_are_named(llama_dir):
    file = llama_dir / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(CheckpointError, match=name):
        check_tensors(FolderCheckpoint(llama_dir))
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match="its config asks for"):
        check_tensors(FolderCheckpoint(llama_dir))


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
def test_damaged_json_is_told_as_such(llama_dir, file, text):
    (llama_dir / file).write_text(text)
    with pytest.raises(CheckpointError):
        FolderCheckpoint(llama_dir)


@pytest.mark.long
@pytest.mark.parametrize("layers", [10_000, 10**7, 10**30])
def test_a_number_of_layers_costs_no_time_before_it_is_checked(llama_dir, layers):
    edit_config(llama_dir, num_hidden_layers=layers)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 1000|lacks the tensor model\.layers\.2\."):
        check_tensors(FolderCheckpoint(llama_dir))
    assert time.process_time() - began < 1


@pytest.mark.parametrize("layers", [1, 2])
def test_a_config_with_fewer_layers_than_the_weights_is_refused(tmp_path, layers):
    """The model would run without its last layers, and answer nonsense."""
    make_hf_model("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    check_tensors(FolderCheckpoint(tmp_path))
    edit_config(tmp_path, num_hidden_layers=layers)
    with pytest.raises(CheckpointError, match=f"has weights of 3 layers, its config says {layers}"):
        check_tensors(FolderCheckpoint(tmp_path))


def test_the_first_missing_tensor_ends_the_check(llama_dir):
    shape = replace(FolderCheckpoint(llama_dir).shape, layers=10**15)
    names = [name for name, _ in islice(expected_tensors(shape), 30)]
    assert names[0] == "model.embed_tokens.weight" and names[-1].startswith("model.layers.3.")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "a/model.safetensors"])
def test_weights_outside_of_the_folder_are_refused(llama_dir, name):
    (llama_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        FolderCheckpoint(llama_dir)


def test_weights_in_whole_numbers_are_refused(llama_dir):
    file = llama_dir / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(UnsupportedModel, match=f"{name} is stored as I8"):
        check_tensors(FolderCheckpoint(llama_dir))
