"""`--kv`: a run on quantised keys and values says so, and is refused where an exact one was asked for."""

import pytest

from tests.support.command import STATISTICS, assert_error, done

PROMPT = ("generate", "Once upon a time there was a king " * 40, "-n", "12", "--temperature", "0", "--raw")


@pytest.mark.parametrize("kind", ["q8", "q4", "fp8"])
def test_a_run_on_quantised_keys_and_values_says_so(triforce, kind):
    result = triforce(*PROMPT, "--json", "--kv", kind)
    last = done(result.stdout)
    assert (last["exact"], last["kv"], last["settings"]["kv"]) == (False, kind, kind)
    assert result.stderr.count("warning: ") == 1 and f"--kv {kind} changes the answer" in result.stderr
    statistics = result.stderr.splitlines()[-1]
    assert STATISTICS.search(statistics) and f"approximate ({kind} keys and values)" in statistics


def test_an_exact_run_says_nothing(triforce):
    result = triforce(*PROMPT, "--json", "--kv", "exact")
    assert (done(result.stdout)["exact"], done(result.stdout)["kv"]) == (True, None)
    assert "approximate" not in result.stderr and "warning" not in result.stderr


@pytest.mark.parametrize("method", ["lookup", "retrieval", "streaming"])
def test_speculation_on_them_changes_nothing(triforce, method):
    """Greedy text on quantised keys and values is the same with every method."""
    more = ("--kv", "q4", "--budget", "64", "-n", "40")
    plain, other = (triforce(*PROMPT, *more, "--method", name) for name in ("ar", method))
    assert plain.stdout == other.stdout and plain.returncode == other.returncode == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--verify",), ("--verify compares with exact decoding, and --kv q4 changes the answer",)),
        (("--dry-run",), ("--dry-run plans exact decoding, not --kv q4",)),
        (("--cache",), ("--cache keeps exact prompts", "leave --cache out")),
        (("--link", "1"), ("--link 1.0 offloads keys and values, and those of --kv q4 stay",)),
        (("--approximate", "h2o"), ("cannot be used together",)),
        (("--kernel", "off"), ("--kv q4 needs the native kernel",)),
        (("--kv", "q5"), ("kv is 'q5'", "exact, q8, q4, fp8")),
    ],
)
def test_refused_with_flags_that_need_exact_keys_and_values(triforce, more, words):
    assert_error(triforce(*PROMPT, "--kv", "q4", *more), 2, *words)


def test_no_profile_chooses_it(triforce, written):
    path = written({"name": "mine", "description": "", "device": "cpu", "gpus": 0, "options": {"kv": "q8"}})
    assert_error(triforce(*PROMPT, "--profile", path), 2, "kv", "options")
