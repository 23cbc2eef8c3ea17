"""The decoder: RoPE that depends on a length, and a prefill that is closed; tests/test_families.py has its logits."""

import pytest
import torch

from offload.architecture.hf_config import shape_from_config
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.formats.tensor_checks import check_tensors
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from tests.support.models import make_hf_model

CPU = torch.device("cpu")
TRAINED = {"original_max_position_embeddings": 64}


def ours(folder, dtype=torch.float32):
    checkpoint = FolderCheckpoint(folder)
    check_tensors(checkpoint)
    return load_model(checkpoint, dtype, CPU, lambda done, total: None)


def token_ids(count, vocab, seed=0):
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


def reference_logits(reference, ids):
    with torch.inference_mode():
        return reference(ids[None], use_cache=False).logits[0]


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
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0} | TRAINED, 256),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | TRAINED, 64),
    ],
)
def test_rope_scaling_stretches_the_context(rope, context):
    config = make_hf_model("llama", max_position_embeddings=64, rope_parameters=rope | {"rope_theta": 1e4}).config
    assert shape_from_config(config.to_dict(), {}).context == context
