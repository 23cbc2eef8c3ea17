"""Log-probabilities of emitted tokens: transformers' on the same tokens, whatever drafted them and however chosen."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.engine import Engine
from tests.batching.test_batch import collect, request
from tests.support.engine import ALL, GREEDY, SMALL, fresh, tokens
from tests.support.models import ids
from tests.support.offloading import make_model

PENALISED = Sampling(temperature=0.7, top_p=0.8, repetition_penalty=1.4)
TREES = [("naive", "model", "k-ary:3x2x1"), ("retrieval", "none", "12"), ("triforce", "lookup", "9")]
SAMPLINGS = {"greedy": GREEDY, "coupled": Sampling(temperature=1.2, coupled=True), "penalised": PENALISED}


@pytest.fixture(scope="module")
def teacher_forced(tiny_model_dir):
    """Return transformers' log-probabilities after a prompt, `[tokens, vocab]`, given the tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def score(prompt, emitted):
        logits = model(torch.tensor([[*prompt, *emitted]])).logits[0, len(prompt) - 1 : -1]
        return logits.double().log_softmax(-1)

    return score


def found_in(events):
    return [each for event in events if isinstance(event, Tokens) for each in event.logprobs]


def assert_are(found, expected, emitted, top):
    """Each has its token's own, and the `top` largest."""
    assert len(found) == len(emitted) == len(expected)
    for each, row, token in zip(found, expected, emitted, strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert [value for _, value in each.top] == pytest.approx(row.topk(top).values.tolist(), abs=2e-4)
        assert [value for _, value in each.top] == pytest.approx([float(row[token]) for token, _ in each.top], abs=2e-4)
        assert [value for token_, value in each.top if token_ == token] in ([], [each.logprob])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("method", "draft", "tree"), [*((*each, "chain") for each in ALL), *TREES])
def test_they_are_those_of_teacher_forcing(endless_engine, teacher_forced, method, draft, tree, sampling):
    """Prompts repeat themselves, so that drafts of all kinds are accepted."""
    prompt = ids(30) * 2
    wanted = Speculation(method, "a model" if draft == "model" else draft, **SMALL, tree=tree)
    config = GenerationConfig(max_new_tokens=24, seed=1)
    events = list(fresh(endless_engine).generate(prompt, SAMPLINGS[sampling], config, wanted, logprobs=3))
    emitted = tokens(events)
    assert_are(found_in(events), teacher_forced(prompt, emitted), emitted, 3)


def test_without_being_asked_for_there_are_none_and_nothing_is_computed(endless_engine, monkeypatch):
    monkeypatch.setattr("offload.speculation.levels.level.token_logprobs", lambda *args: pytest.fail("computed"))
    events = list(fresh(endless_engine).generate(ids(20), GREEDY, GenerationConfig(max_new_tokens=5)))
    assert len(tokens(events)) == 5 and found_in(events) == []


def test_in_a_batch_they_are_each_sequences_own(endless_engine, teacher_forced):
    methods = [("ar", "lookup"), ("triforce", "model"), ("retrieval", "lookup"), ("auto", "lookup")]
    requests = [replace(request(key, each, ids(50, key), 12), logprobs=key % 3) for key, each in enumerate(methods)]
    silent = request(9, ("triforce", "lookup"), ids(40, 9), 12)
    events = collect(fresh(endless_engine).generate_batch([*requests, silent], 5))
    for wanted in requests:
        own = events[wanted.key]
        assert_are(found_in(own), teacher_forced(wanted.ids, tokens(own)), tokens(own), wanted.logprobs)
    assert found_in(events[9]) == []


def test_on_the_native_kernel_speculation_changes_no_bit_of_them(tmp_path):
    """The logits of a position have the same bits however many rows a pass has."""
    model = make_model(tmp_path, torch.bfloat16, native=True)
    found = []
    for method in ("ar", "lookup", "triforce"):
        wanted = Speculation(method, **SMALL, gamma2=None if method == "ar" else 6)
        config = GenerationConfig(max_new_tokens=40)
        events = list(Engine(model, (), 16).generate(ids(30) * 4, GREEDY, config, wanted, logprobs=5))
        found.append((tokens(events), found_in(events)))
    assert found[0] == found[1] == found[2]
