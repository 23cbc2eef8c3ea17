"""The sliding window with recomputation against transformers, which runs each token's window as a text of its own."""

import pytest
import torch

from offload import EngineConfig, open_model
from offload.errors import PromptError
from offload.evaluation.teacher_forcing import Recomputed, continue_greedily, score_text
from tests.support.engine import finished
from tests.support.models import FAMILY_CASES, ids, make_hf_model, make_tokenizer

TEXT, LAST = ids(60), 48
CASES = {"llama": ("llama", {}), "gemma3": FAMILY_CASES["gemma3"]}  # gemma3 has layers with a window of their own


@pytest.fixture(scope="module", params=CASES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(family):
    kind, changes = CASES[family]
    return make_hf_model(kind, **changes).eval()


@pytest.fixture(scope="module")
def engine(family, hf_model, tmp_path_factory):
    path = tmp_path_factory.mktemp(family)
    hf_model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return open_model(EngineConfig(model=str(path), dtype="float32", device="cpu", prefill_chunk=16)).load()


def expected(hf_model, before):
    """Return the log-probabilities `[vocab]` that transformers predicts after the tokens `before` alone."""
    with torch.inference_mode():
        return hf_model(torch.tensor([before])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("window", [1, 20, 37, 100])
def test_each_token_is_predicted_from_its_window_alone(engine, hf_model, window):
    def run(runner):
        return score_text(Recomputed(runner, window), TEXT, LAST, keep=True)

    found = finished(engine.evaluate(TEXT[:window], run))
    first = len(TEXT) - LAST
    windows = [TEXT[max(at - window, 0) : at] for at in range(first, len(TEXT))]
    rows = torch.stack([expected(hf_model, each) for each in windows])
    torch.testing.assert_close(found.distributions, rows, atol=2e-4, rtol=1e-4)
    with torch.inference_mode():
        whole = hf_model(torch.tensor([TEXT])).logits[0, first - 1 : -1].log_softmax(-1)
    differ = (whole - rows).abs().amax(1) > 1e-2
    assert differ.tolist() == [at > window for at in range(first, len(TEXT))]  # where anything lies before the window


def test_a_window_as_long_as_the_text_is_exact(engine):
    exact = finished(engine.evaluate(TEXT, lambda runner: score_text(runner, TEXT, LAST, keep=True)))

    def run(runner):
        return score_text(Recomputed(runner, len(TEXT)), TEXT, LAST, reference=exact)

    found = finished(engine.evaluate(TEXT, run))
    assert found.choices.tolist() == exact.choices.tolist() and found.divergences.abs().max() < 1e-5


def test_greedy_tokens_after_the_window(engine, hf_model):
    text, window = list(TEXT), 20

    def run(runner):
        return continue_greedily(Recomputed(runner, window), TEXT, 6)

    found = finished(engine.evaluate(TEXT[:window], run))
    for _ in found:
        text.append(int(expected(hf_model, text[-window:]).argmax()))
    assert found == tuple(text[-6:])


def test_greedy_tokens_after_a_text_shorter_than_the_window(engine, hf_model):
    engine.release()  # the session of an earlier test may have more room

    def run(runner):
        return continue_greedily(Recomputed(runner, 100), TEXT, 6)

    text, found = list(TEXT), finished(engine.evaluate(TEXT, run, more=6))
    for _ in found:
        text.append(int(expected(hf_model, text).argmax()))
    assert found == tuple(text[-6:])


def test_what_cannot_be_recomputed_is_refused(engine):
    with pytest.raises(AssertionError, match="a window of 0 tokens"):
        Recomputed(engine, 0)
    with pytest.raises(PromptError, match="vocabulary"):
        next(engine.evaluate([9999], lambda runner: score_text(Recomputed(runner, 4), TEXT, LAST)))
