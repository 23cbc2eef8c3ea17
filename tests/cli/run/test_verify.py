"""`--verify`: a run compared with plain decoding, and the report of it."""

import json
import shutil

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, open_model
from offload.errors import TriforceError
from tests.support.command import done, refused
from tests.support.engine import GREEDY, tokens
from triforce_cli.output.statistics import verification_line
from triforce_cli.run.verify import compare, refuse_loss, verification_fields

PROMPT = "the cat and the dog and the cat and the dog and " * 8
RUN = ("generate", PROMPT, "--raw", "-n", "24", "--verify", "--method", "lookup")
IDS = list(range(40, 80))


def greedy(model, ids, count):
    """An engine, and the tokens that plain decoding emits."""
    engine = open_model(EngineConfig(str(model), "cpu", "float32")).load()
    return engine, tokens(engine.generate(ids, GREEDY, GenerationConfig(count), Speculation("ar")))


def test_verify_prints_one_line_unless_quiet(triforce):
    code, _, err = triforce(*RUN, "--temperature", "0")
    assert code == 0 and len(err.splitlines()) == 2 and " equal plain decoding" in err
    code, out, err = triforce(*RUN, "--temperature", "0", "-q")
    assert (code, err) == (0, "") and out


@pytest.mark.parametrize("more", [("--temperature", "1", "--top-p", "1"), ("--repetition-penalty", "1.2")])
def test_coupled_sampling_is_compared_at_any_temperature(triforce, more):
    verify = done(triforce(*RUN, "--seed", "3", "--json", *more).stdout)["verify"]
    assert verify["equal"] and verify["tokens"] >= 8


def test_verify_needs_greedy_decoding_or_coupled_sampling(triforce, tiny_model_dir, tmp_path):
    refused(triforce("generate", "hi", "--verify", "--temperature", "0.7"), "0.7", "--temperature 0")
    refused(triforce("generate", "hi", "--verify"), "0.6", "--temperature 0")
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.35, "eos_token_id": 2}')
    refused(triforce("generate", "hi", "--verify", "--model", tmp_path), "0.35")


def test_a_changed_token_is_found_and_is_an_error(tiny_model_dir):
    engine, emitted = greedy(tiny_model_dir, IDS, 12)
    assert compare(engine, IDS, emitted, GREEDY).equal
    changed = [*emitted[:5], (emitted[5] + 7) % 267, *emitted[6:]]
    verify = verification_fields(compare(engine, IDS, changed, GREEDY), lambda ids: f"<{ids[0]}>")
    assert not verify["lossless"]
    first = verify["divergences"][0]
    assert (first["position"], first["emitted"], first["expected"]) == (5, changed[5], emitted[5])
    assert first["margin"] > first["noise"] > 0
    assert f"token 5 is '<{changed[5]}>' where plain decoding has '<{emitted[5]}>'" in verification_line(verify)
    with pytest.raises(TriforceError, match="more than rounding") as raised:
        refuse_loss(verify)
    assert raised.value.hint


def test_the_end_of_sequence_token_is_compared(tiny_model_dir):
    engine, emitted = greedy(tiny_model_dir, IDS, 12)
    *before, last = emitted
    other = (last + 1) % 267
    assert compare(engine, IDS, before, GREEDY, ended_by=(last,)).equal
    assert compare(engine, IDS, before, GREEDY, ended_by=(other, last)).equal
    found = compare(engine, IDS, before, Sampling(temperature=0), ended_by=(other,))
    assert [one.position for one in found.divergences] == [len(before)] and not found.lossless


def test_a_run_that_the_model_ends_is_verified(triforce, tiny_model_dir, tmp_path):
    ids = open_model(EngineConfig(str(tiny_model_dir), "cpu")).tokenizer.encode(PROMPT, True)
    _, emitted = greedy(tiny_model_dir, ids, 20)
    ignored = shutil.ignore_patterns("generation_config.json")
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True, ignore=ignored)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": emitted[-1]}))
    code, out, err = triforce(*RUN, "--temperature", "0", "--model", tmp_path, "--json")
    end = done(out)
    assert code == 0, err
    assert (end["finish_reason"], end["new_tokens"]) == ("eos", emitted.index(emitted[-1]))
    assert end["verify"]["equal"]
