"""Damaged checkpoints: a typed error that says what is wrong, or a model that works; nothing else, and soon."""

import json
import os
import time

import pytest
import torch

from offload.api.loader import open_model
from offload.errors import CheckpointError, TriforceError
from offload.events import Tokens
from offload.loading.tokenizers.tokenizer_files import load_tokenizer
from offload.settings.config import EngineConfig, GenerationConfig, Sampling
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.mutations import (
    mutated_field,
    mutated_gguf,
    mutated_json,
    mutated_nested_json,
    mutated_safetensors,
    number_offsets,
)

CASES = int(os.environ.get("TRIFORCE_TEST_MUTATIONS", "0"))  # more of each kind, by hand
FIRST = int(os.environ.get("TRIFORCE_TEST_FIRST_SEED", "0"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
BASES = {
    "plain": ("llama", {}),
    "yarn": ("qwen2", {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1, "attention_factor": 1.2}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "dynamic": ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "longrope": ("qwen3", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 512}, "head_dim": 16}),
}


def seeds(count):
    return range(FIRST, FIRST + (CASES or count))


def survives(path, with_tokenizer=False):
    """Open a model, load it and generate. Whether it worked; raises all but a TriforceError that says enough."""
    began, refusal = time.process_time(), None
    try:
        use(path, with_tokenizer)
    except TriforceError as error:
        refusal = error
    assert time.process_time() - began < 1
    assert refusal is None or (refusal.hint and len(refusal.message) < 2000 and "\n" not in refusal.message), refusal
    return refusal is None


def use(path, with_tokenizer):
    opened = open_model(EngineConfig(str(path), device="cpu", dtype="float32", kernel="off", prefill_chunk=64))
    if with_tokenizer:
        opened.tokenizer.encode("the end", special_tokens=True)
    new_tokens = opened.new_tokens(4, 3, exact=False)
    opened.check_fit(4 + new_tokens)
    engine = opened.load()
    events = engine.generate([3, 4, 5, 6], Sampling(temperature=0), GenerationConfig(max_new_tokens=new_tokens))
    assert any(isinstance(event, Tokens) for event in events)
    logits = engine.model.logits(engine.model.forward(torch.arange(3, 9), engine.model.new_cache(6)))
    assert torch.isfinite(logits).all()


@pytest.fixture(scope="module", params=BASES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    family, changes = BASES[request.param]
    make_hf_model(family, **changes).save_pretrained(path)
    assert survives(path)
    return path


def test_damaged_configs(folder):
    file = folder / "config.json"
    text = file.read_text()
    try:
        worked = set()
        for seed in seeds(30):
            file.write_bytes(mutated_json(text, seed))
            worked.add(tried(folder, seed))
    finally:
        file.write_text(text)
    assert worked == {True, False}, "some damage does no harm, some is refused"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_hf_model("llama", tie_word_embeddings=False).save_pretrained(path)
    assert survives(path)
    return path


def test_damaged_safetensors(llama):
    file = llama / "model.safetensors"
    data = file.read_bytes()
    worked = set()
    for seed in seeds(40):
        file.write_bytes(mutated_safetensors(data, seed))
        worked.add(tried(llama, seed))
    assert worked == {True, False}


@pytest.mark.long
def test_damaged_safetensors_take_no_memory(llama):
    """Of 300, none makes the process larger by more than a small model."""
    resource = pytest.importorskip("resource")
    file = llama / "model.safetensors"
    data, before = file.read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(1000, 1300):
        file.write_bytes(mutated_safetensors(data, seed))
        tried(llama, seed)
    file.write_bytes(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.long)])
def test_damaged_tokenizers(tmp_path, count):
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    text, worked = file.read_text(), set()
    for seed in seeds(count):
        file.write_bytes(mutated_nested_json(text, seed))
        worked.add(tried_tokenizer(tmp_path, seed))
    assert worked == {True, False}


def tried_tokenizer(path, seed):
    refusal = None
    try:
        round_trip(path)
    except TriforceError as error:
        refusal = error
    except BaseException as error:
        pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert refusal is None or (refusal.hint and len(refusal.message) < 2000 and "\n" not in refusal.message)
    return refusal is None


def round_trip(path):
    tokenizer = load_tokenizer(path)
    tokenizer.spans("the <|im_start|> end")
    return tokenizer.decode(tokenizer.encode("the end", special_tokens=True))


PANICS = {  # changes of a tokenizer.json for which the library's Rust code panics
    "when it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "when it encodes": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "when it decodes": {"decoder": {"type": "Strip", "content": "e", "start": 99, "stop": 99}},
}


@pytest.mark.parametrize("changes", PANICS.values(), ids=PANICS)
def test_a_panic_in_the_tokenizer_is_an_error(tmp_path, changes):
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match="tokenizer"):
        round_trip(tmp_path)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = make_hf_model("llama", tie_word_embeddings=False)
    write_gguf(path, model, tokenizer=make_tokenizer(), rope={"factor": 4.0, "original_max_position_embeddings": 512})
    assert survives(path, with_tokenizer=True)
    return path


def test_damaged_gguf_bytes(gguf, tmp_path):
    data, (_, metadata) = gguf.read_bytes(), number_offsets(gguf)
    worked = set()
    for seed in seeds(40):
        (tmp_path / "model.gguf").write_bytes(mutated_gguf(data, metadata, seed))
        worked.add(tried(tmp_path / "model.gguf", seed, with_tokenizer=True))
    assert worked == {True, False}


def test_damaged_gguf_numbers(gguf, tmp_path):
    data, (places, _) = gguf.read_bytes(), number_offsets(gguf)
    worked = set()
    for seed in seeds(40):
        (tmp_path / "model.gguf").write_bytes(mutated_field(data, places, seed))
        worked.add(tried(tmp_path / "model.gguf", seed))
    assert worked == {True, False}


def tried(path, seed, **options):
    try:
        return survives(path, **options)
    except Exception as error:
        pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
