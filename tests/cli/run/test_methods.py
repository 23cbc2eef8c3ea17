"""`--method` and its options on the command line: every method's text, and which combinations are refused."""

import json
import re

import pytest

from tests.support.command import done, refused

PROMPT = "the cat and the dog and the cat and the dog and " * 8


GREEDY = ("--raw", "-n", "32", "--temperature", "0")


@pytest.mark.parametrize("method", ["auto", "lookup", "naive", "retrieval", "streaming", "triforce"])
def test_every_method_gives_the_text_of_plain_decoding(triforce, tiny_model_dir, method):
    _, plain, statistics = triforce("generate", PROMPT, *GREEDY, "--method", "ar")
    assert "→" not in statistics
    sizes = ("--budget", "64", "--draft", tiny_model_dir, "--set", "gamma1=3")
    code, out, err = triforce("generate", PROMPT, *GREEDY, "--method", method, *sizes, "--verify", "--json", "-v")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    drafts_by_model = method in ("auto", "naive", "streaming", "triforce", "retrieval")
    assert {line["type"] for line in lines} - {"draft_prefill"} == {"prefill", "text", "done"}
    assert drafts_by_model or "draft_prefill" not in out
    assert "".join(line["text"] for line in lines if line["type"] == "text").rstrip("\n") == plain.rstrip("\n")
    end = lines[-1]
    assert (end["method"], end["settings"]["budget"], end["settings"]["gamma1"]) == (method, 64, 3)
    assert end["verify"]["lossless"] and end["verify"]["tokens"] == end["new_tokens"]
    assert end["tokens_per_verification"] >= 1
    assert sum(end["time_share"].values()) == pytest.approx(1, abs=1e-3)
    assert re.search(rf"^method +{method}\b", err, re.M)
    assert err.splitlines()[-1].startswith("verify: ")
    if method != "auto":  # which may find that nothing pays
        assert "→full " in err and "tokens/verification" in err


def test_impossible_combinations_are_refused(triforce):
    refused(triforce("generate", "hi", "--method", "naive"), "draft model", "--draft")
    refused(triforce("generate", "hi", "--method", "naive", "--draft", "lookup"), "draft model")
    refused(triforce("generate", "hi", "--method", "speculative"), "'speculative'", "lookup")
    refused(triforce("generate", "hi", "--set", "chunk=512", "--budget", "1024"), "1024", "512")
    refused(triforce("generate", "hi", "--budget", "2"), "budget is 2")
    refused(triforce("generate", "hi", "--gamma2", "0"), "gamma2")


def test_a_combination_may_come_from_flag_environment_and_profile(triforce, tiny_model_dir, tmp_path, monkeypatch):
    mine = tmp_path / "mine.yaml"
    about = "name: mine\ndescription: x\ndevice: cpu\n"
    short = ("generate", "hi", "--raw", "-n", "3", "--json", "--profile", mine)
    mine.write_text(f"{about}options: {{method: naive}}\n")
    code, out, err = triforce(*short, "--draft", tiny_model_dir)
    assert (code, done(out)["method"]) == (0, "naive"), err
    refused(triforce(*short), "draft model")
    mine.write_text(f"{about}options: {{draft: '{tiny_model_dir}', budget: 4096}}\n")
    code, out, err = triforce(*short, "--method", "naive", "--set", "chunk=512")
    assert (code, done(out)["method"]) == (0, "naive"), err
    monkeypatch.setenv("TRIFORCE_DRAFT", str(tiny_model_dir))
    code, out, err = triforce("generate", "hi", "--raw", "-n", "3", "--json", "--method", "naive")
    assert (code, done(out)["method"]) == (0, "naive"), err


def test_another_chunk_than_was_asked_for_is_said(triforce):
    text = ("generate", "the cat and the dog " * 60, "--raw", "-n", "4", "--temperature", "0", "--budget", "64")
    for more, sizes in (
        (("--set", "chunk=8"), "8 runs as 16"),
        (("--set", "chunk=16"), None),
        (("--set", "chunk=8", "--method", "lookup"), None),  # selects nothing
        (("--set", "chunk=8", "--kernel", "off"), None),
        (("--set", "chunk=4", "--kernel", "off", "--kv", "exact", "--link", "1", "--resident-layers", "0"), None),
    ):
        found = triforce(*text, "--method", "retrieval", *more)
        said = [line for line in found.stderr.splitlines() if "a chunk of" in line]
        assert found.returncode == 0 and len(said) == (sizes is not None), found.stderr
        assert sizes is None or f"a chunk of {sizes}: whole blocks" in said[0]


def test_the_cache_of_the_middle_level_is_chosen_and_an_unused_one_is_named(triforce):
    text = ("generate", "the cat and the dog " * 60, "--raw", "-n", "12", "--temperature", "0", "--budget", "64")
    plain = triforce(*text, "--method", "ar")
    result = triforce(*text, "--method", "retrieval", "--middle", "h2o", "-v")
    assert result.stdout == plain.stdout
    assert "h2o→full" in result.stderr and "warning" not in result.stderr
    unused = triforce(*text, "--method", "lookup", "--middle", "h2o")
    assert (unused.returncode, unused.stdout) == (0, plain.stdout)
    assert "--middle h2o is not used: --method lookup" in unused.stderr
    assert triforce(*text, "--middle", "h20").returncode == 2
