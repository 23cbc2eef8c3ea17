"""The fingerprint depends on weights, dtype, RoPE and kernel."""

import json

import pytest
import torch

from offload.kernels.native.ops import NativeOperations
from offload.prompt_cache import fingerprint
from offload.prompt_cache.fingerprint import TOKENS, weights_digest
from tests.support.models import ids, make_hf_model
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
