"""`triforce generate` on a tiny model: text, seeds, stop strings, JSON lines, prompts from several places."""

import json
import re

import pytest

from tests.support.command import (
    STATISTICS,
    assert_error,
    refused,
)

PLAIN = ("-n", "40", "--temperature", "1", "--method", "ar", "--dtype", "float32", "--threads", "1")


def test_same_seed_same_text_and_only_text_on_stdout(triforce, process):
    args = ("generate", "Once upon a time", *PLAIN)
    first = process(*args, "--seed", "7")
    assert first.returncode == 0
    assert first.stdout
    assert STATISTICS.search(first.stderr)
    assert len(first.stderr.splitlines()) == 1
    again = triforce(*args, "-q", env={"TRIFORCE_SEED": "7"})
    assert again.stdout == first.stdout
    assert again.stderr == ""
    assert triforce(*args, "--seed", "8").stdout != first.stdout


def test_a_seed_gives_the_same_text_with_every_method(triforce):
    texts = {
        triforce("generate", "Once upon a time", "--raw", "-n", "24", "--seed", "7", "--temperature", "1", *more).stdout
        for more in ((), ("--method", "ar"), ("--method", "lookup", "--gamma2", "3"), ("--set", "coupled=true"))
    }
    assert len(texts) == 1


def test_the_reported_kind_of_sampling(triforce):
    for more, kind in (
        ((), "fastest"),
        (("--seed", "7"), "coupled"),
        (("--seed", "7", "--set", "coupled=false"), "fastest"),
        (("--set", "coupled=true"), "coupled"),
        (("--seed", "7", "--temperature", "0"), "greedy"),
    ):
        done = json.loads(triforce("generate", "Once", "--raw", "-n", "2", "--json", *more).stdout.splitlines()[-1])
        assert (done["sampling"], done["settings"]["coupled"]) == (kind, kind == "coupled" or "0" in more)
    refused(triforce("generate", "Once", "--set", "coupled=best"), "'best'", "true or false")


def test_reported_seed_reproduces_the_text(triforce):
    first = triforce("generate", "Once", *PLAIN, "-v")
    seed = re.search(r"^seed: (\d+)", first.stderr, re.M)[1]
    assert re.search(r"^temperature: .*more settings as by default \(-vv lists all\)$", first.stderr, re.M | re.S)
    assert "(default)" not in first.stderr
    assert triforce("generate", "Once", *PLAIN, "--seed", seed, "--set", "coupled=false").stdout == first.stdout
    assert triforce("generate", "Once", *PLAIN).stdout != first.stdout


def test_json_lines(triforce):
    args = ("generate", "Once upon a time", "-n", "24", "--seed", "7", "--method", "ar", "--top-k", "20")
    result = triforce(*args, "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {event["type"] for event in events} == {"prefill", "text", "done"}
    done = events[-1]
    assert done["type"] == "done"
    assert done["finish_reason"] in ("length", "eos")
    assert done["new_tokens"] <= 24
    assert done["settings"]["top_k"] == 20
    for key in ("prompt_tokens", "ttft_s", "tbt_median_s", "tbt_p95_s", "tokens_per_s", "seed", "model", "method"):
        assert done[key] is not None, key
    text = "".join(event["text"] for event in events if event["type"] == "text")
    assert text.rstrip("\n") + "\n" == triforce(*args).stdout  # which ends with a newline


def test_stop_strings_end_the_text_and_are_not_printed(triforce):
    args = ("generate", "Once upon a time", "-n", "60", "--temperature", "0")
    whole = triforce(*args).stdout
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    result = triforce(*args, "--stop", stop, "--stop", "never there", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    text = "".join(event["text"] for event in events if event["type"] == "text")
    assert text == whole[: whole.find(stop)]
    assert events[-1]["finish_reason"] == "stop"


def test_parts_of_a_prompt_are_joined(triforce, tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    args = ("-n", "8", "--temperature", "0", "--raw", "-q")
    files = ("--prompt-file", str(tmp_path / "a.txt"), "--prompt-file", "-", "--prompt-file", str(tmp_path / "b.txt"))
    joined = triforce("generate", *files, "last", *args, stdin=b"piped")
    assert joined.returncode == 0
    assert joined.stdout == triforce("generate", "first\n\npiped\n\nsecond\n\nlast", *args, stdin=None).stdout


@pytest.mark.parametrize("command", [["generate", "--raw"], ["bench"]])
def test_the_argument_may_be_stdin(triforce, command):
    args = [*command, "--temperature", "0", "-n", "4", "--dry-run", "--json"]

    def tokens(*words, stdin=None):
        return json.loads(triforce(*args, *words, stdin=stdin).stdout)["plan"]["context"]

    assert tokens("Once upon") == tokens("-", stdin=b"Once upon") > tokens("Once")
    assert_error(triforce(*args, "-", "-f", "-", stdin=b"x"), 2, "twice")
