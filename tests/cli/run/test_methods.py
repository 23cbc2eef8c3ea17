"""`--method` and its options on the command line: every method's text, and which combinations are refused."""

import json
import re

import pytest

from tests.support.command import refused

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
