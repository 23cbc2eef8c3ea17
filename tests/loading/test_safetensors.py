"""Folders of safetensors: shards, and files that are truncated, damaged or lack tensors."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from tests.support.checkpoints import IDS, edit_config, logits
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


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated_safetensors_is_found_before_loading(llama_dir, keep):
    file = llama_dir / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
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
        ("model.safetensors.index.json", '{"weight_map": ["a"]}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../model.safetensors"}}'),
    ],
)
def test_damaged_json_is_told_as_such(llama_dir, file, text):
    (llama_dir / file).write_text(text)
    with pytest.raises(CheckpointError):
        FolderCheckpoint(llama_dir)


def test_a_config_with_fewer_layers_than_the_weights_is_refused(tmp_path):
    """The model would run without its last layers, and answer nonsense."""
    make_hf_model("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    check_tensors(FolderCheckpoint(tmp_path))
    edit_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="has weights of 3 layers, its config says 2"):
        check_tensors(FolderCheckpoint(tmp_path))


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_beside_a_tied_embedding_is_used_if_it_differs(tmp_path, differs):
    from transformers import AutoModelForCausalLM

    model = make_hf_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding.flip(0).contiguous() if differs else embedding.clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = FolderCheckpoint(tmp_path)
    check_tensors(checkpoint)
    assert checkpoint.shape.tied_embeddings is not differs
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(IDS[None]).logits[0]
    assert torch.allclose(logits(checkpoint), expected, atol=1e-4)


def test_weights_in_whole_numbers_are_refused(llama_dir):
    file = llama_dir / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(UnsupportedModel, match=f"{name} is stored as I8"):
        check_tensors(FolderCheckpoint(llama_dir))
