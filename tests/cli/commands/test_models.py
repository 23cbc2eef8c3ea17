"""`triforce models`: what is on this machine, what can be fetched, and `rm`."""

import json

import pytest

from offload.architecture.known_models import KNOWN
from tests.support.command import assert_error


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub's cache with one model of 300 bytes, and an embedded one of 20 beside it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    home = tmp_path / "hub" / "models--someone--tiny"
    for folder in (home / "blobs", home / "refs", home / "snapshots" / "0123abc"):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abc")
    (home / "blobs" / "b").write_bytes(bytes(300))
    (home / "snapshots" / "0123abc" / "model.safetensors").symlink_to(home / "blobs" / "b")
    embedded = tmp_path / "home" / "models" / "smollm2-135m-0.1.2"
    embedded.mkdir(parents=True)
    (embedded / "model.gguf").write_bytes(bytes(20))
    (embedded.parent / ".partial-1-x").mkdir()
    return home


def test_models_here_are_listed_and_removed(triforce_here, hub):
    def listed():
        shown = json.loads(triforce_here("models", "--json").stdout)
        assert {model["name"] for model in shown["known"]} == set(KNOWN) - {"SmolLM2-135M"}
        return {model["name"]: model["size"] for model in shown["stored"]}

    assert listed() == {"smollm2-135m": 20, "someone/tiny": 300}
    assert_error(triforce_here("models", "rm", "someone/other"), 2, "someone/other", "triforce models")
    code, out, err = triforce_here("models", "rm", "Someone/Tiny")
    assert (code, out, err) == (0, "removed 0.0 MB\n", "") and not hub.exists()
    assert triforce_here("models", "rm", "smollm2-135m").returncode == 0 and listed() == {}


def test_known_models_come_by_memory_class_current_ones_first(triforce_here, hub):
    out = triforce_here("models").stdout
    assert out.splitlines()[1].startswith(("someone/tiny", "smollm2-135m"))
    assert {name for name in KNOWN if f"  {name} " in out} >= {"Qwen3-4B-2507", "gpt-oss-20b", "Llama-3.3-70B"}
    names = [
        "\nfor 4 GiB\n",
        "  Qwen3-0.6B ",
        "  Qwen2.5-0.5B ",
        "\nfor 8 GiB\n",
        "  Qwen3-1.7B ",
        "\nfor 12 GiB\n",
        "  Qwen3-4B-2507 ",
    ]
    places = [out.index(name) for name in names]
    assert places == sorted(places)
    assert "Apache 2.0" in out and "gated: Llama 3.2" in out and "InternLM" not in out
