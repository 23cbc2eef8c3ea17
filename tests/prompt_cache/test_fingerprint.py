"""The fingerprint depends on weights, their quantisation, dtype, RoPE and kernel."""

import copy
import json
import os
import shutil
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType

from offload.api.loader import open_model
from offload.errors import CheckpointError
from offload.kernels.native.ops import NativeOperations
from offload.loading import weights_digest
from offload.prompt_cache import fingerprint
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import PromptFolder
from offload.settings.config import EngineConfig
from tests.support.gguf import write_gguf
from tests.support.hf_quantization import gptq, write_quantized
from tests.support.models import ids, make_hf_model, make_tokenizer
from tests.support.offloading import native_kernel
from tests.support.prompt_cache import LENGTH, engine_on, said


def test_blocks_are_not_restored_where_others_of_equal_size_and_times_replace_the_weights(
    model_dir, home, tmp_path, monkeypatch
):
    """As `cp -p`, `rsync -t` and archives do, of which some give all files one time."""
    monkeypatch.setattr(weights_digest, "TICK", -1.0)  # also files that were just written are noted
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    shutil.copytree(model_dir, ours)
    make_hf_model("llama", head_dim=32, seed=1).save_pretrained(theirs)
    weights, other = (each / "model.safetensors" for each in (ours, theirs))
    for path in (weights, other):
        os.utime(path, (1e9, 1e9))
    assert weights.stat().st_size == other.stat().st_size
    prompt, old = ids(LENGTH), weights.read_bytes()
    said(engine_on(ours, home), prompt)
    shutil.copy2(other, weights)
    expected, _ = said(engine_on(ours, None), prompt)
    assert said(engine_on(ours, home), prompt) == (expected, 0)
    weights.write_bytes(old)  # the first weights' blocks are found once more
    os.utime(weights, (1e9, 1e9))
    expected, _ = said(engine_on(ours, None), prompt)
    assert said(engine_on(ours, home), prompt) == (expected, 7 * TOKENS)


def fingerprint_of(config, home):
    """Return the fingerprint of a model's KV as it is opened and loaded with this configuration."""
    opened = open_model(config)
    prompts = opened.prompt_cache(PromptFolder(home, 1 << 30))
    model = opened.load().model
    return fingerprint.fingerprint(model, model.new_cache(256), 64, prompts.weights)


@pytest.fixture(params=["torch", "native"])
def changed(request, model_dir, monkeypatch):
    """Return a function that says whether changing one fact changes the fingerprint of a loaded model's cache.

    A fact is an attribute of the model, or the version of a package, or another chunk.
    """
    if request.param == "native" and native_kernel() is None:
        pytest.skip("there is no native kernel here")
    kernel = copy.copy(native_kernel())  # whose attributes may be changed
    model = engine_on(model_dir, None, operations=NativeOperations(kernel) if request.param == "native" else None).model
    cache = model.new_cache(256)

    def name(chunk=64, weights="weights"):
        return fingerprint.fingerprint(model, cache, chunk, weights)

    def is_changed(fact, value):
        before = name()
        with monkeypatch.context() as patch:
            if fact == "version":
                patch.setattr(fingerprint, "version", lambda package: "9" if package == value else version(package))
            elif fact in ("chunk", "weights"):
                return name(**{fact: value}) != before
            else:
                holder = {"level": kernel, "device": type(model)}.get(fact, model)
                patch.setattr(holder, fact, value)
            return name() != before

    is_changed.kind = request.param
    return is_changed


FACTS = {
    "weights": ("weights", "others", "both"),
    "dtype": ("dtype", torch.bfloat16, "both"),
    "device": ("device", torch.device("meta"), "both"),
    "ranks": ("group", SimpleNamespace(rank=0, size=2), "both"),
    "format of keys and values": ("kv", "q8", "both"),
    "version of torch": ("version", "torch", "torch"),
    "version of triforce": ("version", "triforce", "native"),
    "level of the kernel": ("level", "another", "native"),
    "chunk": ("chunk", 128, "torch"),
}


@pytest.mark.parametrize("fact", FACTS)
def test_each_fact_alone_changes_the_fingerprint_where_it_changes_bits(changed, fact):
    name, value, kind = FACTS[fact]
    if (name, changed.kind) == ("level", "torch"):
        return  # it has no kernel
    assert changed(name, value) is (kind in (changed.kind, "both"))


def test_a_block_s_key_depends_on_all_blocks_before_it():
    one, other = (list(fingerprint.chain("model", ids(TOKENS, seed) + ids(2 * TOKENS + 5))) for seed in (1, 2))
    assert len(one) == 3 and not set(one) & set(other)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "changes_kv"),
    [
        ({"rms_norm_eps": 1e-3}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, True),
        ({"sliding_window": 32, "model_type": "mistral"}, True),
        ({"model_type": "qwen3"}, None),  # refused: its norms are missing
        ({"eos_token_id": 7}, False),
        ({"transformers_version": "1.0"}, False),
    ],
    ids=str,
)
def test_a_config_that_changes_keys_and_values_has_a_fingerprint_of_its_own(
    tiny_model_dir, tmp_path, home, changes, changes_kv
):
    shutil.copytree(tiny_model_dir, folder := tmp_path / "model")
    config = EngineConfig(model=str(folder), device="cpu", kernel="off")
    first = fingerprint_of(config, home)
    change_config(folder, **changes)
    if changes_kv is None:
        with pytest.raises(CheckpointError):
            fingerprint_of(config, home)
        return
    assert (fingerprint_of(config, home) != first) is changes_kv


def test_how_quantised_weights_are_read_is_part_of_the_fingerprint(tmp_path, home):
    """The same codes stand for other weights in the other version of GPTQ."""
    model = make_hf_model("llama", hidden_size=128, intermediate_size=192)
    folder, settings = tmp_path / "model", {"quant_method": "gptq", "bits": 4, "sym": False}
    write_quantized(folder, model, partial(gptq, symmetric=False), settings)
    make_tokenizer().save_pretrained(folder)
    config = EngineConfig(model=str(folder), device="cpu", kernel="off")
    first = fingerprint_of(config, home)
    change_config(folder, quantization_config=settings | {"checkpoint_format": "gptq_v2"})
    assert fingerprint_of(config, home) != first


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
