"""The engine: the order of events, every finish reason, and iterators that are closed early."""

import pytest
import torch

from offload import (
    EngineConfig,
    Finished,
    GenerationConfig,
    Prefilled,
    Sampling,
    Speculated,
    Speculation,
    Tokens,
    open_model,
)
from offload.api.diagnosis import kernel_state
from offload.engine import Engine
from offload.errors import PromptError, SettingsError
from tests.support.models import make_hf_model, make_tokenizer

GREEDY = Sampling(temperature=0)
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def opened(tiny_model_dir):
    return open_model(EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu", prefill_chunk=16))


@pytest.fixture(scope="module")
def engine(opened):
    return opened.load()


def tokens(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_events_come_in_order(engine):
    engine = Engine(engine.model, (), 16)
    events = list(engine.generate(PROMPT, GREEDY, GenerationConfig(max_new_tokens=5), Speculation(method="ar")))
    assert [event.done for event in events if isinstance(event, Prefilled)] == [0, 16, 32, 40]
    kinds = [type(event) for event in events]
    assert kinds == [Prefilled] * 4 + [Speculated, Tokens] * 5 + [Finished]
    assert events[-1].reason == "length"


def test_greedy_equals_transformers(engine, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    expected = reference.generate(torch.tensor([PROMPT]), max_new_tokens=50, do_sample=False)[0, len(PROMPT) :].tolist()
    expected = expected[: expected.index(2)] if 2 in expected else expected
    assert tokens(engine.generate(PROMPT, GREEDY, GenerationConfig(max_new_tokens=50))) == expected


def test_every_end_of_sequence_token_ends_and_is_not_emitted(engine):
    plain = tokens(engine.generate(PROMPT, GREEDY, GenerationConfig(max_new_tokens=8)))
    ends = {plain[4], plain[6]}
    first = min(plain.index(end) for end in ends)
    stopping = Engine(engine.model, tuple(ends), 16)
    events = list(stopping.generate(PROMPT, GREEDY, GenerationConfig(max_new_tokens=8)))
    assert tokens(events) == plain[:first]
    assert events[-1] == Finished("eos")


@pytest.mark.parametrize(("steps", "committed"), [(1, 0), (2, 16), (4, 40), (6, 40), (10, 42)])
def test_an_abandoned_run_leaves_its_cache_at_its_committed_length(engine, monkeypatch, steps, committed):
    made, new_cache = [], engine.model.new_cache
    monkeypatch.setattr(engine.model, "new_cache", lambda *size: made.append(new_cache(*size)) or made[-1])
    run = Engine(engine.model, (), 16).generate(
        PROMPT, GREEDY, GenerationConfig(max_new_tokens=6), Speculation(method="ar")
    )
    emitted = tokens([next(run) for _ in range(steps)])
    run.close()
    (cache,) = made
    assert cache.length == committed
    sequence = torch.tensor(PROMPT + emitted + [7])
    fresh = engine.model.forward(sequence, new_cache(50, engine.model.rope(46)))
    resumed = engine.model.forward(sequence[committed:-1], cache) if committed < len(sequence) - 1 else None
    last = engine.model.forward(sequence[-1:], cache)
    assert resumed is None or torch.allclose(resumed, fresh[committed:-1], atol=1e-4)
    assert torch.allclose(last, fresh[-1:], atol=1e-4)


def test_a_longer_question_on_the_same_document_runs_the_question_only(engine):
    first, second = [*PROMPT, 50, 51], [*PROMPT, 60, 61, 62, 63]
    config = GenerationConfig(max_new_tokens=5)

    def read(engine, ids):
        return [event.done for event in engine.generate(ids, GREEDY, config) if isinstance(event, Prefilled)]

    without = Engine(engine.model, (), 16)
    read(without, first)
    assert read(without, second)[0] == 0  # the session has no room
    reserved = Engine(engine.model, (), 16)
    reserved.reserve(len(second) + 5)
    read(reserved, first)
    assert read(reserved, second) == [len(PROMPT), len(second)]
    fresh = tokens(Engine(engine.model, (), 16).generate(second, GREEDY, config))
    assert tokens(reserved.generate(second, GREEDY, config)) == fresh


def test_the_context_is_never_truncated_silently(opened):
    assert opened.new_tokens(100, 50, exact=True) == 50
    assert opened.new_tokens(2040, 50, exact=False) == 8
    with pytest.raises(PromptError, match=r"2,040 .* 50 .* 2,048"):
        opened.new_tokens(2040, 50, exact=True)
    with pytest.raises(PromptError, match=r"2,048 tokens, which leaves no room"):
        opened.new_tokens(2048, 1, exact=False)


def test_an_unusable_kernel_is_refused_before_loading(tiny_model_dir):
    with pytest.raises(SettingsError, match="the native kernel cannot be used: "):
        open_model(EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float16", kernel="portable"))
    opened = open_model(EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float16"))
    assert opened.kernel == "off"


@pytest.mark.skipif(not kernel_state("auto")["levels"], reason="the kernel was not built here")
def test_a_draft_model_that_the_kernel_does_not_support_is_named(tiny_model_dir, tmp_path):
    make_hf_model("llama", num_attention_heads=8).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float32", kernel="portable")
    with pytest.raises(
        SettingsError, match="the draft model: the native kernel cannot be used: it does not support heads of 8"
    ):
        open_model(config, speculation=Speculation("naive", draft=str(tmp_path)))


def test_the_engine_describes_its_kernel(tiny_model_dir):
    for kernel in ("off", *kernel_state("auto")["levels"]):
        opened = open_model(EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float32", kernel=kernel))
        assert opened.kernel == kernel
        assert opened.load().describe() == "cpu, float32" + ("" if kernel == "off" else f", {kernel} kernel")


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 4, "prompt is empty"),
        ([5, 10**9, 7], 4, "token id 1,000,000,000 at position 1 is not in the vocabulary of 267 tokens"),
        ([5, 6, -1], 4, "token id -1 at position 2"),
        ([267], 4, "token id 267 at position 0"),
        ([0] * 9000, 4, "9,004 tokens, prompt and answer, exceed the model's context of 2,048"),
        ([0] * 2000, 49, "2,049 tokens"),
        ([5, 1.5], 4, "1.5 at position 1 is not a token id"),
        ([True, False], 4, "True at position 0"),
        ("hello", 4, "'hello', of type str, are no token ids"),
        ([None], 4, "None at position 0"),
        ([[1, 2]], 4, r"\[1, 2\] at position 0"),
        (torch.tensor([0.5]), 4, "0.5 at position 0"),
    ],
)
def test_impossible_prompts_are_refused_with_the_numbers(engine, prompt, new, message):
    with pytest.raises(PromptError, match=message) as raised:
        list(engine.generate(prompt, Sampling(temperature=0), GenerationConfig(max_new_tokens=new)))
    assert raised.value.hint
    with pytest.raises(PromptError):
        engine.replay(prompt, [0] * new)


def test_tensors_and_arrays_are_prompts_too(engine):
    expected = tokens(engine.generate(PROMPT, GREEDY, GenerationConfig(max_new_tokens=4)))
    for prompt in (
        torch.tensor(PROMPT),
        torch.tensor(PROMPT).numpy(),
        list(torch.tensor(PROMPT).numpy()),
        tuple(PROMPT),
    ):
        assert tokens(engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=4))) == expected
