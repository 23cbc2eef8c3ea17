"""`--kv`: a run on quantised keys and values says so, and is refused where an exact one was asked for."""

import json

import pytest

from tests.support.command import STATISTICS, assert_error, done

PROMPT = ("generate", "Once upon a time there was a king " * 40, "-n", "12", "--temperature", "0", "--raw")


@pytest.mark.parametrize("kind", ["q8"])
def test_a_run_on_quantised_keys_and_values_says_so(triforce, kind):
    result = triforce(*PROMPT, "--json", "--kv", kind)
    last = done(result.stdout)
    assert (last["exact"], last["kv"], last["settings"]["kv"]) == (False, kind, kind)
    assert result.stderr.count("warning: ") == 1 and f"--kv {kind} changes the answer" in result.stderr
    statistics = result.stderr.splitlines()[-1]
    assert STATISTICS.search(statistics) and f"approximate ({kind} keys and values)" in statistics


@pytest.mark.parametrize("mode", ["h2o", "streaming-llm"])
def test_a_cache_that_evicts_may_round_what_it_keeps(triforce, mode):
    more = ("--approximate", mode, "--budget", "160", "--set", "sink=2", "--set", "window=8", "--json")
    plain, other = (triforce(*PROMPT, *more, "--kv", kind) for kind in ("bf16", "q8"))
    last = done(other.stdout)
    assert (last["exact"], last["kv"], last["approximate"]) == (False, "q8", mode)
    assert "--kv q8 changes the answer" in other.stderr and f"--approximate {mode} changes the answer" in other.stderr
    statistics = other.stderr.splitlines()[-1]
    assert f"approximate ({mode})" in statistics and "approximate (q8 keys and values)" in statistics
    assert last["prompt_tokens"] == done(plain.stdout)["prompt_tokens"] > 2 * 160


def test_an_exact_run_says_nothing(triforce):
    result = triforce(*PROMPT, "--json", "--kv", "bf16")
    assert (done(result.stdout)["exact"], done(result.stdout)["kv"]) == (True, None)
    assert "approximate" not in result.stderr and "warning" not in result.stderr


@pytest.mark.parametrize("method", ["lookup", "retrieval", "streaming"])
def test_speculation_on_them_changes_nothing(triforce, method):
    """Greedy text on quantised keys and values is the same with every method."""
    more = ("--kv", "q8", "--budget", "64", "-n", "40")
    plain, other = (triforce(*PROMPT, *more, "--method", name) for name in ("ar", method))
    assert plain.stdout == other.stdout and plain.returncode == other.returncode == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--verify",), ("--verify compares with exact decoding, and --kv q8 changes the answer",)),
        (("--kernel", "off"), ("--kv q8 needs the native kernel",)),
        (("--kv", "q5"), ("kv is 'q5'", "auto, bf16, packed, q8")),
    ],
)
def test_refused_with_flags_that_need_exact_keys_and_values(triforce, more, words):
    assert_error(triforce(*PROMPT, "--kv", "q8", *more), 2, *words)


@pytest.mark.parametrize("where", [(), ("--offload", "hybrid", "--resident-layers", "1")], ids=" ".join)
def test_offloaded_ones_have_the_text_of_those_in_memory(triforce, where):
    """Planned smaller, too: what lies in host memory has fewer bytes."""
    more = ("-n", "300", "--link", "5", *where)
    here, found = (triforce(*PROMPT, "--kv", "q8", *each) for each in (more[:2], more))
    assert (found.returncode, found.stdout) == (0, here.stdout), found.stderr
    plans = [
        json.loads(triforce(*PROMPT, *more, "--dry-run", "--json", "--kv", kind).stdout) for kind in ("q8", "bf16")
    ]
    small, large = (each["plan"]["memory"]["host"]["total"] for each in plans)
    assert 0 < small < large / 2


def test_no_profile_chooses_it(triforce, written):
    path = written({"name": "mine", "description": "", "device": "cpu", "gpus": 0, "options": {"kv": "q8"}})
    assert_error(triforce(*PROMPT, "--profile", path), 2, "kv", "options")
