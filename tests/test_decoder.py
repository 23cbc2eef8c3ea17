"""The decoder against transformers: every family, every RoPE type, whole, chunked and token by token."""

from dataclasses import replace

import pytest
import torch

from offload.architecture.hf_config import shape_from_config
from offload.errors import CheckpointError
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.weights import load_model
from offload.model.decoder import Model
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from tests.support.models import make_hf_model

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama-mha-untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-own-head-dim": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biased": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
}
PROMPT, DECODED = 150, 8


def ours(folder, dtype=torch.float32):
    checkpoint = FolderCheckpoint(folder)
    check_tensors(checkpoint)
    return load_model(checkpoint, dtype, CPU, lambda done, total: None)


def token_ids(count, vocab, seed=0):
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


def test_the_progress_of_a_pass_counts_its_layers(tmp_path, monkeypatch):
    make_hf_model("llama").save_pretrained(tmp_path)
    model = ours(tmp_path)
    cache, seen = model.new_cache(16), []
    run_layer = Model._attend

    def watched(self, *args):
        seen.append(self.pass_tokens)
        return run_layer(self, *args)

    monkeypatch.setattr(Model, "_attend", watched)
    model.forward(torch.arange(8), cache)
    layers = model.shape.layers
    assert seen == [8 * done / layers for done in range(layers)]
    assert model.pass_tokens == 0


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """transformers' model, ours from the same files, and some token ids."""
    family, config = CASES[request.param]
    reference = make_hf_model(family, **config).eval()
    reference.save_pretrained(tmp_path)
    return reference, ours(tmp_path), token_ids(PROMPT + DECODED, reference.config.vocab_size)


def reference_logits(reference, ids):
    with torch.inference_mode():
        return reference(ids[None], use_cache=False).logits[0]


def test_whole_prompt_gives_transformers_logits(pair):
    reference, model, ids = pair
    found = model.logits(model.forward(ids, model.new_cache(len(ids))))
    assert (found - reference_logits(reference, ids)).abs().max() < 1e-4


@pytest.mark.daily("*-7", "llama-1", "yarn-1", "longrope-*")
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_and_decode_give_transformers_logits(pair, chunk):
    reference, model, ids = pair
    expected = reference_logits(reference, ids)
    runner, sequence = Runner(model, model.new_cache(len(ids)), chunk), TokenSequence(ids[:PROMPT].tolist())
    assert list(runner.prefill(sequence))[-1].done == PROMPT
    for position in range(PROMPT, PROMPT + DECODED):
        found = model.logits(runner.rows(sequence))
        assert (found - expected[position - 1]).abs().max() < 1e-4
        sequence.extend([int(ids[position])])
    assert runner.cache.length == len(ids) - 1


def test_logits_vary_enough_for_the_comparison_to_mean_something(pair):
    reference, _, ids = pair
    assert reference_logits(reference, ids).std() > 0.05


def test_dynamic_rope_beyond_the_trained_length_scales_to_what_the_cache_may_reach(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    reference = make_hf_model("llama", max_position_embeddings=64, rope_parameters=rope).eval()
    reference.save_pretrained(tmp_path)
    model, ids = ours(tmp_path), token_ids(100, reference.config.vocab_size)
    cache = model.new_cache(100)
    found = [model.logits(model.forward(part, cache)) for part in ids.split(30)]
    assert (torch.cat(found) - reference_logits(reference, ids)).abs().max() < 1e-4


def test_prefill_goes_on_from_where_it_was_closed(tmp_path):
    reference = make_hf_model("llama").eval()
    reference.save_pretrained(tmp_path)
    model, ids = ours(tmp_path), token_ids(60, reference.config.vocab_size)
    runner, sequence = Runner(model, model.new_cache(60), 16), TokenSequence(ids[:59].tolist())
    first = runner.prefill(sequence)
    assert [next(first).done for _ in range(3)] == [0, 16, 32]
    first.close()
    assert runner.cache.length == 32
    assert [event.done for event in runner.prefill(sequence)] == [32, 48, 59]
    sequence.extend([int(ids[59])])
    found = model.logits(runner.rows(sequence))
    assert (found[0] - reference_logits(reference, ids)[-1]).abs().max() < 1e-4


def test_all_caches_of_a_sequence_share_its_rotations(tmp_path):
    """With length-dependent RoPE, room for tokens in flight must not change what a sequence's tokens mean."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    make_hf_model("llama", max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    model = ours(tmp_path)
    ids, shared = token_ids(80, 267), model.rope(90)
    caches = [model.new_cache(90, shared), model.new_cache(97, shared), model.new_cache(97)]
    plain, roomy, other = (model.forward(ids, cache) for cache in caches)
    assert torch.equal(plain, roomy)
    assert not torch.allclose(plain, other, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "context"), [("default", 64), ("linear", 256), ("dynamic", 256), ("yarn", 256), ("llama3", 64)]
)
def test_rope_scaling_stretches_the_context(kind, context):
    known = {"rope_theta": 10000.0, "rope_type": kind}
    more = {"yarn": YARN, "llama3": LLAMA3}.get(kind, {"factor": 4.0} if kind != "default" else {})
    config = make_hf_model("llama", max_position_embeddings=64, rope_parameters=known | more).config
    assert shape_from_config(config.to_dict(), {}).context == context


def test_rope_parameters_of_the_wrong_length_are_refused(tmp_path):
    wrong = LONGROPE | {"short_factor": [1.0], "long_factor": [1.0]}
    make_hf_model("llama").save_pretrained(tmp_path)
    model = ours(tmp_path)
    model.shape = replace(model.shape, rope=wrong)
    with pytest.raises(CheckpointError, match="8 are wanted"):
        model.rope(10)


def test_bf16_blocks_of_rows_agree_with_single_rows(tmp_path):
    """On CPUs without bf16 matrix instructions, blocks are multiplied in fp32; both must be bf16's answer."""
    reference = make_hf_model("llama").eval()
    reference.save_pretrained(tmp_path)
    model, ids = ours(tmp_path, torch.bfloat16), token_ids(64, reference.config.vocab_size)
    whole = model.logits(model.forward(ids, model.new_cache(64)))
    cache = model.new_cache(64)
    single = torch.cat([model.logits(model.forward(ids[i : i + 1], cache)) for i in range(64)])
    expected = reference_logits(reference, ids)
    scale = expected.std()
    assert (whole - expected).abs().mean() < 0.05 * scale
    assert (single - expected).abs().mean() < 0.05 * scale
