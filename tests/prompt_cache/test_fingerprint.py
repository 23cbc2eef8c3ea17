"""The fingerprint depends on weights, their quantisation, dtype, RoPE and kernel."""

import json

import pytest
import torch
from gguf import GGMLQuantizationType

from offload.config import EngineConfig
from offload.kernels.native.ops import NativeOperations
from offload.loader import open_model
from offload.prompt_cache import fingerprint
from offload.prompt_cache.fingerprint import TOKENS, weights_digest
from offload.prompt_cache.folder import PromptFolder
from tests.support.gguf import write_gguf
from tests.support.models import ids, make_hf_model, make_tokenizer
from tests.support.offloading import native_kernel
from tests.support.prompt_cache import LENGTH, engine_on, said


@pytest.mark.parametrize("change", ["weights", "dtype", "rope", "kernel"])
def test_blocks_of_another_fingerprint_are_not_restored(model_dir, home, tmp_path, change):
    prompt, options, other = ids(LENGTH), {}, model_dir
    said(engine_on(model_dir, home), prompt)
    if change == "dtype":
        options = {"dtype": torch.bfloat16}
    elif change == "kernel":
        if native_kernel() is None:
            pytest.skip("there is no native kernel here")
        options = {"operations": NativeOperations(native_kernel())}
    else:
        other, changes = tmp_path / "other", {"seed": 1}
        if change == "rope":
            changes = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
        make_hf_model("llama", head_dim=32, **changes).save_pretrained(other)
    expected, _ = said(engine_on(other, None, **options), prompt)
    assert said(engine_on(other, home, **options), prompt) == (expected, 0)


def test_entries_of_another_version_are_ignored(model_dir, home, monkeypatch):
    prompt = ids(LENGTH)
    monkeypatch.setattr(fingerprint, "VERSION", fingerprint.VERSION - 1)
    expected, _ = said(engine_on(model_dir, home), prompt)
    monkeypatch.undo()
    assert said(engine_on(model_dir, home), prompt) == (expected, 0)
    assert said(engine_on(model_dir, home), prompt) == (expected, 7 * TOKENS)


def test_the_digest_of_weights_is_cached_until_they_change(tmp_path):
    weights, notes = tmp_path / "weights", tmp_path / "notes"
    weights.write_bytes(b"one")
    first = weights_digest([weights], notes)
    note = json.loads(notes.read_text())
    assert weights_digest([weights], notes) == first
    assert json.loads(notes.read_text()) == note
    weights.write_bytes(b"two")
    assert weights_digest([weights], notes) != first
    for nonsense in (b"", b"[]", b"{", b'{"a": 3}', b"\xff", json.dumps({str(weights): [3, 4]}).encode()):
        notes.write_bytes(nonsense)
        assert weights_digest([weights], notes) != first


def fingerprint_of(config, home):
    """Return the fingerprint of a model's KV as it is opened and loaded with this configuration."""
    opened = open_model(config)
    prompts = opened.prompt_cache(PromptFolder(home, 1 << 30))
    model = opened.load().model
    return fingerprint.fingerprint(model, model.new_cache(256), 64, prompts.weights)


def test_quantised_weights_have_fingerprints_of_their_own(model_dir, tmp_path, home):
    """Rounded on loading or stored so; a GGUF file is dequantised where torch or fp32 computes."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    path = tmp_path / "model.gguf"
    write_gguf(path, make_hf_model("llama"), GGMLQuantizationType.Q8_0, tokenizer=make_tokenizer())
    loaded = [
        *({"model": str(model_dir), "quantize": level} for level in (None, "q4", "q8")),
        *({"model": str(path), **changes} for changes in ({}, {"dtype": "float32"}, {"kernel": "off"})),
    ]
    names = [fingerprint_of(EngineConfig(device="cpu", **each), home) for each in loaded]
    assert len(set(names)) == len(names)
    assert fingerprint_of(EngineConfig(device="cpu", **loaded[1]), home) == names[1]
