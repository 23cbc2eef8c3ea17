"""`--verify`: a run compared with plain decoding, and the report of it."""

import json

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, open_model
from offload.errors import TriforceError
from offload.events import Tokens
from tests.support.command import done, refused
from triforce_cli.output.statistics import verification_line
from triforce_cli.run.verify import compare, refuse_loss, verification_fields

PROMPT = "the cat and the dog and the cat and the dog and " * 8


GREEDY = ("--raw", "-n", "32", "--temperature", "0")


def greedy(model, ids, count, **changes):
    """An engine, and what plain decoding emits."""
    engine = open_model(EngineConfig(str(model), "cpu", "float32")).load()
    config = GenerationConfig(count)
    events = engine.generate(ids, Sampling(temperature=0), config, Speculation("ar"))
    return engine, [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_verify_prints_one_line_unless_quiet(triforce):
    code, _, err = triforce("generate", PROMPT, *GREEDY, "--verify", "--method", "lookup")
    assert code == 0
    assert len(err.splitlines()) == 2
    assert " equal plain decoding" in err
    code, out, err = triforce("generate", PROMPT, *GREEDY, "--verify", "-q")
    assert (code, err) == (0, "")
    assert out


def test_verify_compares_with_coupled_sampling_at_any_temperature(triforce):
    for more in (("--temperature", "1", "--top-p", "1"), ("--temperature", "0.6", "--repetition-penalty", "1.2")):
        args = (
            "generate",
            PROMPT,
            "--raw",
            "-n",
            "24",
            "--seed",
            "3",
            "--method",
            "lookup",
            "--verify",
            "--json",
            *more,
        )
        verify = json.loads(triforce(*args).stdout.splitlines()[-1])["verify"]
        assert verify["equal"] and verify["tokens"] >= 8 and verify["closest"]["margin"] > 0


def test_verify_needs_greedy_decoding_or_coupled_sampling(triforce, tiny_model_dir, tmp_path):
    refused(triforce("generate", "hi", "--verify", "--temperature", "0.7"), "0.7", "--temperature 0")
    refused(triforce("generate", "hi", "--verify"), "0.6", "--temperature 0")
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.35, "eos_token_id": 2}')
    (tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.gone")
    refused(triforce("generate", "hi", "--verify", "--temperature", "1", "--model", tmp_path), "1.0")
    (tmp_path / "model.safetensors.gone").rename(tmp_path / "model.safetensors")
    refused(triforce("generate", "hi", "--verify", "--model", tmp_path), "0.35")


def test_a_changed_token_is_found_and_is_an_error(tiny_model_dir):
    ids = list(range(40, 80))
    engine, emitted = greedy(tiny_model_dir, ids, 12)
    assert compare(engine, ids, emitted, Sampling(temperature=0)).equal
    changed = [*emitted[:5], (emitted[5] + 7) % 267, *emitted[6:]]
    found = compare(engine, ids, changed, Sampling(temperature=0))
    verify = verification_fields(found, lambda tokens: f"<{tokens[0]}>")
    assert not verify["lossless"]
    first = verify["divergences"][0]
    assert (first["position"], first["emitted"], first["expected"]) == (5, changed[5], emitted[5])
    assert first["margin"] > first["noise"] > 0
    assert f"token 5 is '<{changed[5]}>' where plain decoding has '<{emitted[5]}>'" in verification_line(verify)
    with pytest.raises(TriforceError, match="more than rounding") as raised:
        refuse_loss(verify)
    assert raised.value.hint


def test_the_end_of_sequence_token_is_compared(tiny_model_dir):
    ids = list(range(40, 80))
    engine, emitted = greedy(tiny_model_dir, ids, 12)
    *before, last = emitted
    assert compare(engine, ids, before, Sampling(temperature=0), ended_by=(last,)).equal
    assert compare(engine, ids, before, Sampling(temperature=0), ended_by=((last + 1) % 267, last)).equal
    found = compare(engine, ids, before, Sampling(temperature=0), ended_by=((last + 1) % 267,))
    assert [one.position for one in found.divergences] == [len(before)]
    assert not found.lossless


def test_a_run_that_the_model_ends_is_verified(triforce, tiny_model_dir, tmp_path):
    _, emitted = greedy(
        tiny_model_dir, open_model(EngineConfig(str(tiny_model_dir), "cpu")).tokenizer.encode(PROMPT, True), 20
    )
    for file in tiny_model_dir.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": emitted[-1]}))
    code, out, err = triforce("generate", PROMPT, *GREEDY, "--model", tmp_path, "--verify", "--json")
    end = done(out)
    assert code == 0, err
    assert end["finish_reason"] == "eos"
    assert end["new_tokens"] == emitted.index(emitted[-1])
    assert end["verify"]["equal"]
