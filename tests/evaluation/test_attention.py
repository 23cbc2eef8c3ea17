"""The attention that a selection recovers, against transformers' attention weights."""

import pytest
import torch

from offload import EngineConfig, open_model
from offload.caches.selection import HeavyHitterSelector, RecencySelector, RetrievalSelector
from offload.errors import SettingsError
from offload.evaluation.attention import Policy, recovered_attention
from offload.speculation.passes.runner import Runner
from tests.support.engine import finished
from tests.support.models import ids, make_hf_model

TEXT, LAST, CHUNK = ids(100), 12, 4


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    config = EngineConfig(str(tiny_model_dir), dtype="float32", device="cpu", kernel="off")
    return open_model(config).load().model


@pytest.fixture(scope="module")
def before_last():
    """The attention weights that transformers computes for the last tokens and the one before them.

    `[layers, heads, 1 + LAST, tokens]`
    """
    hf = make_hf_model("llama").eval()
    hf.set_attn_implementation("eager")
    with torch.inference_mode():
        found = hf(torch.tensor([TEXT]), output_attentions=True).attentions
    return torch.stack([each[0, :, -LAST - 1 :] for each in found])


@pytest.fixture(scope="module")
def expected(before_last):
    """The attention weights of the last tokens: `[layers, heads, LAST, tokens]`."""
    return before_last[:, :, 1:]


def recovered(model, selectors, **more):
    runner = Runner(model, model.new_cache(len(TEXT)), 80)
    policies = {name: Policy(selector, 4, CHUNK, **more) for name, selector in selectors.items()}
    with torch.inference_mode():
        return finished(recovered_attention(runner, TEXT, LAST, policies))


def test_the_latest_tokens_recover_what_they_receive(model, expected):
    found = recovered(model, {"streaming": RecencySelector(CHUNK, CHUNK)})["streaming"]
    end = (len(TEXT) - LAST) // CHUNK * CHUNK
    kept = torch.cat((torch.arange(CHUNK), torch.arange(end - 3 * CHUNK, end)))
    heads = expected.shape[1] // model.shape.kv_heads
    grouped = expected[..., :end].unflatten(1, (-1, heads)).mean(2)
    share = grouped[..., kept].sum(-1) / grouped.sum(-1)
    torch.testing.assert_close(found, share.mean(1).T, atol=1e-5, rtol=1e-4)


def test_nothing_recovers_more_than_the_ideal(model, expected):
    selectors = {"retrieval": RetrievalSelector(CHUNK, CHUNK), "h2o": HeavyHitterSelector(CHUNK, CHUNK), "ideal": None}
    found = recovered(model, selectors)
    end = (len(TEXT) - LAST) // CHUNK * CHUNK
    heads = expected.shape[1] // model.shape.kv_heads
    grouped = expected.unflatten(1, (-1, heads)).mean(2)
    ideal = grouped[..., :end].topk(4 * CHUNK).values.sum(-1) / grouped[..., :end].sum(-1)
    torch.testing.assert_close(found["ideal"], ideal.mean(1).T, atol=1e-5, rtol=1e-4)
    for shares in found.values():
        assert bool((shares <= found["ideal"] + 1e-5).all()) and bool((shares > 0).all())


def test_the_best_tokens_of_the_prompts_end_are_chosen_once(model, before_last):
    """TriForce, section 3.2: how much of later attention to the prompt falls on the last token's largest weights."""
    runner = Runner(model, model.new_cache(len(TEXT)), 80)
    with torch.inference_mode():
        found = finished(recovered_attention(runner, TEXT, LAST, {"once": Policy(None, 4, CHUNK, fixed=True)}))["once"]
    end = (len(TEXT) - LAST) // CHUNK * CHUNK
    heads = before_last.shape[1] // model.shape.kv_heads
    first, *scored = before_last[..., :end].unflatten(1, (-1, heads)).mean(2).unbind(2)  # [layers, kv_heads, end] each
    kept = first.topk(4 * CHUNK).indices
    expected = torch.stack([(each.gather(2, kept).sum(2) / each.sum(2)).mean(1) for each in scored])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_selection_that_is_made_anew_recovers_more_on_the_whole(model):
    once = recovered(model, {"retrieval": RetrievalSelector(CHUNK, CHUNK)})["retrieval"]
    often = recovered(model, {"retrieval": RetrievalSelector(CHUNK, CHUNK)}, every=1)["retrieval"]
    assert torch.equal(once[0], often[0]) and not torch.equal(once, often)


def test_the_native_kernels_blocks_are_refused(tiny_model_dir):
    config = EngineConfig(str(tiny_model_dir), dtype="bfloat16", device="cpu")
    native = open_model(config).load().model
    if native.operations.kernel is None:
        pytest.skip("the native kernel is not built")
    with pytest.raises(SettingsError, match="torch's attention"):
        recovered(native, {"streaming": RecencySelector(CHUNK, CHUNK)})
