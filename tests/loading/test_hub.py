"""Models by name, folder or hub id: where they are found, and what is said where they are not."""

import json

import pytest

from offload.errors import CheckpointError, FetchError, ModelNotFound
from offload.loading.hub.download import _HUB_FILES, dimensions, locate, open_checkpoint


def test_folder_without_config_or_weights(llama_dir, tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (llama_dir / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="no model"):
        open_checkpoint(llama_dir)
    (llama_dir / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(llama_dir)


def test_unknown_names(tmp_path):
    with pytest.raises(ModelNotFound) as caught:
        locate("smolm2-135m", tmp_path)
    assert "did you mean smollm2-135m" in caught.value.hint
    with pytest.raises(ModelNotFound):
        locate("missing.gguf", tmp_path)


@pytest.mark.parametrize("kind", [{}, {"model_type": "gemma4_assistant"}, {"speculators_model_type": "eagle3"}])
def test_a_hub_model_is_taken_from_its_cache(llama_dir, tmp_path, monkeypatch, kind):
    """So is a drafter, whose config is not a model's."""
    from huggingface_hub import constants

    config = json.loads((llama_dir / "config.json").read_text())
    (llama_dir / "config.json").write_text(json.dumps(config | kind))
    home = tmp_path / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abc")
    (home / "snapshots").mkdir()
    llama_dir.rename(home / "snapshots" / "0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert locate("someone/tiny", tmp_path) == home / "snapshots" / "0123abc"


def test_only_one_copy_of_the_weights_is_asked_of_the_hub():
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    unwanted = ["consolidated.safetensors", "fp16/model.safetensors", "original/params.json", "pytorch_model.bin"]
    assert list(filter_repo_objects(wanted + unwanted, **_HUB_FILES)) == wanted


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Qwen/Qwen2.5-7B-Intruct-1M", "did you mean Qwen2.5-7B-1M, "), ("someone/own", "check the network")],
)
def test_a_mistyped_id_that_the_hub_does_not_give_has_a_hint(monkeypatch, name, hint):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Got: ConnectError: no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FetchError, match="to fetch it: ConnectError: no network") as raised:
        dimensions(name)
    assert raised.value.hint.startswith(hint)
