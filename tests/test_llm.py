"""The library's text API: pieces of whole characters, sessions that reuse a text, batches, and typed mistakes."""

import ast
import subprocess
import sys

import pytest

import offload
import triforce
from offload import (
    LLM,
    EngineConfig,
    Finished,
    GenerationConfig,
    OutOfMemory,
    Prefilled,
    PromptError,
    Sampling,
    SettingsError,
    Text,
    Tokens,
    open_model,
)
from offload.api.ask_options import AskOptions
from offload.settings.constraint import Constraint
from tests.support.paths import ROOT

TEXT = "the quick brown fox " * 20
GREEDY = {"temperature": 0, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    return LLM(EngineConfig(str(tiny_model_dir), device="cpu"))


def prefilled_before(answer):
    """The tokens of a prompt that were in memory before it was run."""
    return next(event for event in list(answer.events()) if isinstance(event, Prefilled)).done


def test_pieces_make_up_the_text_and_hold_no_part_of_a_character(llm):
    events = list(llm.ask(TEXT, seed=3, temperature=1.5, max_new_tokens=200).events())  # mostly bytes, few characters
    ids = [token for event in events if isinstance(event, Tokens) for token in event.ids]
    pieces = [event.text for event in events if isinstance(event, Text)]
    assert "".join(pieces) == llm.tokenizer.decode(ids)
    assert list(llm.ask(TEXT, seed=3, temperature=1.5, max_new_tokens=200)) == [piece for piece in pieces if piece]
    assert [type(event) for event in events].count(Finished) == 1


def test_an_answer_ends_at_a_stop_string_and_says_so(llm):
    whole = llm.ask(TEXT, seed=1, max_new_tokens=40)
    text = whole.read()
    assert whole.finish_reason == "length" and whole.read() == ""
    cut = llm.ask(TEXT, seed=1, max_new_tokens=40, stop=text[5:7])
    assert cut.read() == text[: text.index(text[5:7])] and cut.finish_reason == "stop"


def test_a_stop_string_cuts_a_constrained_answer(llm):
    text = '{"kind": "hero"}'
    asked = {"constraint": Constraint("json-schema", '{"const": {"kind": "hero"}}'), "seed": 1, "max_new_tokens": 40}
    assert llm.ask(TEXT, **asked).read() == text
    cut = llm.ask(TEXT, stop='": ', **asked)
    assert cut.read() == '{"kind' and cut.finish_reason == "stop"


def test_a_seed_gives_one_text_and_no_seed_several(llm):
    hot = {"temperature": 1.5, "max_new_tokens": 24}
    assert llm.ask(TEXT, seed=5, **hot).read() == llm.ask(TEXT, seed=5, **hot).read()
    assert len({llm.ask(TEXT, **hot).read() for _ in range(4)}) > 1


def test_a_session_reads_its_text_once(llm):
    llm.engine.release()
    with llm.session(TEXT, room=300) as session:
        assert prefilled_before(session.ask("Who?", **GREEDY)) == 0
        long = llm.tokenizer.encode(TEXT)
        later = session.ask("And what about the others of whom there was no word? " * 3, **GREEDY)
        assert prefilled_before(later) >= len(long)
        expected = LLM(llm.opened.config).ask(TEXT, "Who?", **GREEDY).read()
        assert session.ask("Who?", **GREEDY).read() == expected
        assert llm.engine.idle_session is not None
    assert llm.engine.idle_session is None


def test_an_abandoned_answer_leaves_its_caches_to_the_next(llm):
    with llm.ask(TEXT, **GREEDY) as answer:
        next(answer)
    assert list(answer) == [] and answer.finish_reason is None
    assert prefilled_before(llm.ask(TEXT, "Who?", **GREEDY)) > 300


def test_a_batch_answers_as_single_questions_do_and_an_error_ends_one(llm):
    prompts = [(TEXT, "Who?"), None, "Hello", TEXT * 1000, (TEXT, "What?")]
    answers = {each.index: each for each in llm.batch(iter(prompts), parallel=2, **GREEDY)}
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert all(isinstance(answers[index].error, PromptError) for index in (1, 3))
    for index in (0, 2, 4):
        prompt = prompts[index] if isinstance(prompts[index], tuple) else (prompts[index], "")
        assert answers[index].text == llm.ask(*prompt, **GREEDY).read() and answers[index].error is None


def test_what_does_not_fit_is_refused_before_weights_are_loaded(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("offload.api.llm.free_memory", lambda device: 2**20)
    llm = LLM(tiny_model_dir)
    with pytest.raises(OutOfMemory, match="not enough memory"):
        llm.ask(TEXT)
    assert "engine" not in vars(llm)
    with pytest.raises(SettingsError, match="context has 2,048 tokens"):
        LLM(tiny_model_dir, max_length=4096)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda llm: llm.ask(None), "the text is None, of type NoneType"),
        (lambda llm: llm.ask("a\ud800"), "half a surrogate pair, U.D800, at position 1"),
        (lambda llm: llm.ask("a", stop=5), "stop is 5, of type int"),
        (lambda llm: llm.ask("a", max_tokens=5), "there is no option max_tokens"),
        (lambda llm: llm.session("a", room="many"), "room is 'many'"),
        (lambda llm: LLM(5), "the model is 5, of type int"),
        (lambda llm: open_model(llm.opened.config, speculation="lookup"), "speculation is 'lookup'"),
        (lambda llm: EngineConfig(model=5), "model is 5, of type int"),
        (lambda llm: Sampling(top_k=1.5), "top-k is 1.5, of type float"),
        (lambda llm: GenerationConfig(stop="end"), "stop is 'end', of type str"),
        (lambda llm: llm.tokenizer.encode(b"a"), "the text is b'a', of type bytes"),
        (lambda llm: list(llm.engine.generate("a", Sampling(), GenerationConfig())), "'a', of type str, are no token"),
    ],
)
def test_a_wrong_type_is_a_typed_error_with_a_hint(llm, wrong, message):
    with pytest.raises((PromptError, SettingsError), match=message) as caught:
        wrong(llm)
    assert caught.value.hint


def test_every_field_of_sampling_and_generation_is_an_option():
    fields = {**Sampling.__dataclass_fields__, **GenerationConfig.__dataclass_fields__}
    assert set(AskOptions.__annotations__) == {*fields, "system", "think"}


def test_exported_names_are_seen_by_people_and_type_checkers():
    """And importing them lazily stays lazy: `import offload` imports neither torch nor numpy."""
    tree = ast.parse((ROOT / "offload" / "__init__.py").read_text("utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in checked.body for alias in node.names}
    assert imported == offload._HOMES and sorted(imported) == sorted(offload.__all__)
    assert set(offload.__all__) <= set(dir(offload)) and set(triforce.__all__) == set(dir(triforce))
    assert triforce.LLM is offload.LLM
    code = (
        "import sys, offload; dir(offload); offload.Sampling(); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "False False\n"
    )
