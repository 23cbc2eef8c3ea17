"""Model names: what each form stands for, and close names for a wrong one."""

import json

import pytest

from offload.architecture.known_models import KNOWN
from offload.errors import FetchError, ModelNotFound, UnsupportedModel
from offload.loading.hub.download import describe_source, dimensions, locate
from offload.loading.hub.registry import EMBEDDED_KNOWN, HUB_MODELS, ModelSource, resolve


def test_every_known_model_has_a_source():
    assert set(KNOWN) == {*HUB_MODELS, *EMBEDDED_KNOWN}
    for name in KNOWN:
        assert resolve(name).known == name


@pytest.mark.parametrize(
    ("asked", "kind", "target"),
    [
        ("Llama-2-7B-128K", "hub", "NousResearch/Yarn-Llama-2-7b-128k"),
        ("llama 2 7b 128k", "hub", "NousResearch/Yarn-Llama-2-7b-128k"),
        ("llama-3.1-8b-instruct", "hub", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Mistral-Nemo-Instruct-2407", "hub", "mistralai/Mistral-Nemo-Instruct-2407"),
        ("Qwen3-4B-Instruct-2507", "hub", "Qwen/Qwen3-4B-Instruct-2507"),
        ("smollm2-135m", "embedded", "smollm2-135m"),
        ("SmolLM2-135M", "embedded", "smollm2-135m"),
        ("meta-llama/Meta-Llama-3.1-8B", "hub", "meta-llama/Meta-Llama-3.1-8B"),  # not the instruct model
        ("someone/some-model", "hub", "someone/some-model"),
        ("someone/some-GGUF:Q4_K_M", "gguf", "someone/some-GGUF"),
        ("someone/some-GGUF/Q8_0/a-00001-of-00002.gguf", "gguf", "someone/some-GGUF"),
    ],
)
def test_what_a_name_stands_for(asked, kind, target):
    source = resolve(asked)
    assert (source.kind, source.target) == (kind, target)


def test_a_path_comes_before_a_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    assert resolve("Qwen3-8B") == ModelSource("path", "Qwen3-8B")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("llama-2-7b-12k", "Llama-2-7B-128K"),
        ("lama-3.1-8b", "Llama-3.1-8B"),
        ("llama-3.1-8b-base", "Llama-3.1-8B"),  # other weights
        ("smolm2-135m", "smollm2-135m"),
        ("SmolLM2-135M-Instruct.gguf", "smollm2-135m"),
        ("", None),
        ("zzz", None),
    ],
)
def test_a_wrong_name_suggests_a_close_one(asked, meant):
    with pytest.raises(ModelNotFound) as caught:
        resolve(asked)
    hint = caught.value.hint
    assert "`triforce models` lists all" in hint
    assert ("did you mean" in hint) == (meant is not None)
    if meant is not None:
        named = hint.partition("?")[0].removeprefix("did you mean ").split(", ")
        assert named[0] == meant and len(named) <= 3


def test_gated_models_say_so():
    assert "gated" in describe_source("Llama-3.1-8B")
    assert "gated" in describe_source("meta-llama/Llama-3.1-8B-Instruct")
    assert "NousResearch/Yarn-Llama-2-7b-128k" in describe_source("Llama-2-7B-128K")
    assert describe_source("smollm2-135m") == describe_source("someone/some-model") == ""


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert file_download.constants is constants
    return tmp_path


def test_the_dimensions_of_a_hub_model_come_from_its_cached_config(llama_dir, hub_cache):
    home = hub_cache / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abc")
    (home / "snapshots" / "0123abc").mkdir(parents=True)
    config = json.loads((llama_dir / "config.json").read_text())
    (home / "snapshots" / "0123abc" / "config.json").write_text(json.dumps(config))
    assert dimensions("someone/tiny").hidden == config["hidden_size"]


def test_the_dimensions_of_an_unreachable_hub_model(hub_cache):
    with pytest.raises(FetchError, match="someone/unknown"):
        dimensions("someone/unknown")
    assert dimensions("someone/Llama-3.1-8B-Instruct-GGUF") == KNOWN["Llama-3.1-8B"]


@pytest.mark.parametrize("name", ["a/b--c", "a/..", "a/b.", "a/b.git", "a/" + "b" * 120, "-a/b", "a/-b"])
def test_a_name_that_the_hub_would_refuse_is_no_hub_id(name):
    with pytest.raises(ModelNotFound, match="no model at"):
        resolve(name)


@pytest.mark.parametrize("name", ["InternLM-7B", "internlm/internlm-20b"])
def test_a_model_for_plans_alone_is_not_downloaded(name, tmp_path):
    with pytest.raises(UnsupportedModel, match="for plans alone") as raised:
        locate(name, tmp_path)
    assert raised.value.hint.startswith("triforce profile --model InternLM")
