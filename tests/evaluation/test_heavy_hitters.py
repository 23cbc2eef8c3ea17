"""How concentrated attention is, and what masking does, against transformers' attention."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from offload import EngineConfig, open_model
from offload.errors import SettingsError
from offload.evaluation.heavy_hitters import concentration, heaviest, mean_map, score_masked
from offload.speculation.passes.runner import Runner
from tests.support.engine import finished
from tests.support.models import ids, make_hf_model

TEXT, LAST, LEAST, SHARE = ids(150), 9, 70, 0.1


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    config = EngineConfig(str(tiny_model_dir), dtype="float32", device="cpu", kernel="off")
    return open_model(config).load().model


@pytest.fixture(scope="module")
def hf():
    found = make_hf_model("llama").eval()
    found.set_attn_implementation("eager")
    return found


def weights_of(hf, tokens):
    """Return transformers' attention weights `[layers, heads, tokens, tokens]`."""
    with torch.inference_mode():
        return torch.stack([each[0] for each in hf(torch.tensor([tokens]), output_attentions=True).attentions])


@torch.inference_mode()
def test_the_share_of_few_tokens_the_small_weights_and_what_tokens_receive(model, hf):
    found = finished(concentration(Runner(model, model.new_cache(len(TEXT))), TEXT, SHARE, LEAST))
    weights = weights_of(hf, TEXT)
    grouped = weights.unflatten(1, (model.shape.kv_heads, -1)).sum((2, 3))
    torch.testing.assert_close(found.received, grouped, atol=1e-4, rtol=1e-4)
    kept, sparsity = [], []
    for position in range(LEAST - 1, len(TEXT)):
        row = weights[:, :, position, : position + 1]
        kept.append(row.sort(-1, descending=True).values[..., : int(SHARE * (position + 1))].sum(-1).mean(1))
        sparsity.append((row < 0.01 * row.amax(-1, keepdim=True)).float().mean((1, 2)))
    torch.testing.assert_close(found.kept, torch.stack(kept).mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.sparsity, torch.stack(sparsity).mean(0), atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_map_is_the_mean_over_heads_and_pieces(model, hf):
    found = mean_map(Runner(model, model.new_cache(len(TEXT))), TEXT[:40], 16)
    expected = torch.stack([weights_of(hf, TEXT[start : start + 16]).mean(1) for start in (0, 16)]).mean(0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_heaviest_are_those_that_received_most_behind_the_sink():
    received = torch.tensor([[[9.0, 1, 5, 7, 2]]])
    assert heaviest(received, 2).tolist() == [[[0, 3]]]
    assert heaviest(received, 2, first=1).tolist() == [[[3, 2]]]


@torch.inference_mode()
def test_masked_tokens_are_those_that_transformers_does_not_attend_to(model, hf, monkeypatch):
    """Each layer and KV head has others; what came before was computed with all."""
    start, shape = len(TEXT) - LAST, model.shape
    draws = torch.rand(shape.layers, shape.kv_heads, start - 1, generator=torch.Generator().manual_seed(0))
    masked = draws.topk(60).indices
    exact = modeling_llama.eager_attention_forward

    def attend(module, query, key, value, mask, scaling, **more):
        own = mask.expand(-1, query.shape[1], -1, -1).clone()
        for head in range(query.shape[1]):
            some = masked[module.layer_idx, head // module.num_key_value_groups]
            own[0, head, start - 1 :, some] = float("-inf")
        return exact(module, query, key, value, own, scaling, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    logits = hf(torch.tensor([TEXT])).logits[0, start - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(TEXT[start:])[:, None])[:, 0]
    found = finished(score_masked(model, TEXT, LAST, masked)).log_probs
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    plain = finished(score_masked(model, TEXT, LAST, None)).log_probs
    assert (plain - found).abs().max() > 1e-2


def test_the_native_kernels_blocks_are_refused(tiny_model_dir):
    native = open_model(EngineConfig(str(tiny_model_dir), dtype="bfloat16", device="cpu")).load().model
    if native.operations.kernel is None:
        pytest.skip("the native kernel is not built")
    with pytest.raises(SettingsError, match="torch's attention"):
        mean_map(Runner(native, native.new_cache(20)), TEXT, 16)


def test_models_whose_layers_differ_and_texts_that_are_too_short_are_refused(model, monkeypatch):
    with pytest.raises(SettingsError, match="150 tokens are too few"):
        finished(concentration(Runner(model, model.new_cache(200)), TEXT))
    monkeypatch.setattr(type(model.shape), "is_uniform", False)
    with pytest.raises(SettingsError, match="not measured"):
        finished(concentration(Runner(model, model.new_cache(200)), TEXT, SHARE, LEAST))
    with pytest.raises(SettingsError, match="not measured"):
        finished(score_masked(model, TEXT, LAST, None))
