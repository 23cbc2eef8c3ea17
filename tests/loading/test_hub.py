"""Models by name, folder or hub id: where they are found, and what is said where they are not."""

import json
from types import SimpleNamespace

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


FILES = ["README.md", "mmproj-Q4_K_M.gguf", "tiny-Q4_K_M.gguf", "UD-Q4_K_M/tiny-UD-Q4_K_M.gguf", "tiny-Q4_K_S.gguf"]
FILES += [f"Q8_0/tiny-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ("Q4_K_M", FILES[2:3]),
        ("q4_k_s", FILES[4:5]),
        ("UD-Q4_K_M", FILES[3:4]),
        ("Q8_0", FILES[5:]),
        ("Q8_0/tiny-Q8_0-00001-of-00002.gguf", FILES[5:]),
    ],
)
def test_one_gguf_model_of_a_repository_is_fetched_with_all_its_parts(tmp_path, monkeypatch, wanted, parts):
    """And found again in the hub's cache, but not without a part."""
    home = tmp_path / "models--someone--tiny-GGUF"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abc")
    folder, asked = home / "snapshots" / "0123abc", []

    def fetch(repository, allow_patterns=(), local_files_only=False):
        if local_files_only:
            return str(folder)
        for name in asked.append(allow_patterns) or allow_patterns:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        return str(folder)

    siblings = [SimpleNamespace(rfilename=name) for name in FILES]
    monkeypatch.setattr("huggingface_hub.model_info", lambda repository: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    name = f"someone/tiny-GGUF{'/' if wanted.endswith('.gguf') else ':'}{wanted}"
    assert locate(name, tmp_path) == locate(name, tmp_path) == folder / parts[0] and asked == [parts]
    (folder / parts[-1]).unlink()
    assert locate(name, tmp_path) == folder / parts[0] and asked == [parts, parts]
    with pytest.raises(ModelNotFound, match="has no GGUF file Q2_K") as raised:
        locate("someone/tiny-GGUF:Q2_K", tmp_path)
    assert "tiny-Q4_K_S.gguf" in raised.value.hint and "Q8_0/tiny-Q8_0.gguf" in raised.value.hint


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
