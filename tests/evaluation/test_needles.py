"""The texts of the needle test, and their scores."""

import pytest
import torch

from offload import EngineConfig, open_model
from offload.evaluation.needles import make_needles, score_needle
from tests.support.engine import finished
from tests.support.models import make_hf_model, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def text(tokenizer):
    return tokenizer.encode("the cat and the dog went in. " * 40)


def test_needles_lie_at_their_depths_in_texts_of_one_length(tokenizer, text):
    absent, deep, middle, early = make_needles(text, tokenizer.encode, 3)
    assert [each.depth for each in (absent, deep, middle, early)] == [None, *map(pytest.approx, (5 / 6, 1 / 2, 1 / 6))]
    for needle in (deep, middle, early):
        assert len(needle.prompt) + len(needle.answer) == len(text)
        said, key = tokenizer.decode(needle.prompt), tokenizer.decode(needle.answer)
        assert len(key.strip()) == 7 and said.count(key.strip()) == 2
        assert said.endswith("The pass key is")
        assert said.index(key.strip()) / len(said) == pytest.approx(needle.depth, abs=0.15)
        assert tokenizer.encode(said + key) == [*needle.prompt, *needle.answer]
    assert tokenizer.decode(absent.prompt).count("pass key") == 1  # in the question
    assert len({needle.answer for needle in (deep, middle, early)}) == 3
    at = round(0.5 * len(text))
    assert deep.prompt[:at] == absent.prompt[:at]  # one beginning, which a cache runs once


def test_a_text_that_is_too_short(tokenizer):
    with pytest.raises(ValueError, match="30 tokens are too few"):
        make_needles(list(range(30)), tokenizer.encode, 1)


def test_the_score_is_the_log_probability_of_the_answer(tiny_model_dir, tokenizer, text):
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu", prefill_chunk=256)
    engine = open_model(config).load()
    needle = make_needles(text, tokenizer.encode, 1)[1]
    whole = [*needle.prompt, *needle.answer]
    score = finished(engine.evaluate(whole, lambda runner: score_needle(runner, needle)))
    with torch.inference_mode():
        rows = make_hf_model("llama").eval()(torch.tensor([whole])).logits[0].log_softmax(-1)
    answer = torch.tensor(needle.answer)
    rows = rows[-len(answer) - 1 : -1]
    assert score.log_prob == pytest.approx(float(rows.gather(1, answer[:, None]).mean()), abs=1e-4)
    assert score.depth == needle.depth and not score.found
    likely = type(needle)(0.5, needle.prompt, (int(rows[0].argmax()),))
    assert finished(engine.evaluate(whole, lambda runner: score_needle(runner, likely))).found
