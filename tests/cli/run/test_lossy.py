"""Modes that change the answer: each run says so everywhere, and no profile chooses one."""

import json

import pytest

from offload.settings.methods import APPROXIMATIONS
from tests.support.command import STATISTICS, assert_error, done
from tests.support.offloading import native_kernel

PROMPT = ("generate", "Once upon a time there was a king " * 40, "-n", "8", "--temperature", "0", "--raw")
SMALL = ("--budget", "160", "--set", "sink=2", "--set", "window=16")
BF16 = ("--dtype", "bfloat16")
needs_kernel = pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")


@pytest.mark.parametrize(("mode", "kv"), [(None, "bf16"), (None, "q8"), *((mode, "bf16") for mode in APPROXIMATIONS)])
def test_a_lossy_run_says_so(triforce, mode, kv):
    more = () if mode is None else (*SMALL, "--approximate", mode)
    result = triforce(*PROMPT, *more, "--json", "--kv", kv)
    last, statistics = done(result.stdout), result.stderr.splitlines()[-1]
    lossy = [] if mode is None else [(f"--approximate {mode}", f"approximate ({mode})")]
    lossy += [("--kv q8", "approximate (q8 keys and values)")] if kv == "q8" else []
    assert (last["exact"], last["approximate"], last["kv"]) == (not lossy, mode, "q8" if kv == "q8" else None)
    assert (last["settings"]["approximate"], last["settings"]["kv"]) == (mode, kv)
    assert mode is None or (last["method"], last["cached_tokens"]) == ("ar", 0)
    assert result.stderr.count("warning: ") == len(lossy) and STATISTICS.search(statistics)
    assert all(f"{flag} changes the answer" in result.stderr and said in statistics for flag, said in lossy)
    assert ("approximate" in statistics) == bool(lossy)


@needs_kernel
def test_rounded_weights_are_named_and_warned_of(triforce):
    result = triforce(*PROMPT, *BF16, "--json", "--quantize", "q4")
    last, statistics = done(result.stdout), result.stderr.splitlines()[-1]
    assert last["quantize"] == last["settings"]["quantize"] == "q4" and result.stderr.count("warning: ") == 1
    assert "--quantize q4 changes the model" in result.stderr and "weights rounded to q4" in statistics
    plain = triforce(*PROMPT, *BF16, "--json")
    assert done(plain.stdout)["quantize"] is None and "quantize" not in plain.stderr and "rounded" not in plain.stderr


@pytest.mark.long
def test_a_prompt_beyond_the_context_is_read_and_nothing_of_it_is_kept_on_disk(triforce, tmp_path):
    text, wanted = "the cat and the dog " * 900, ("-n", "4", "--raw", *SMALL, "--json")
    assert_error(triforce("generate", text, *wanted), 2, "leaves no room in the model's context")
    more = {"TRIFORCE_CACHE": "1"}  # for exact runs
    result = triforce("generate", text, *wanted, "--approximate", "h2o", env=more)
    assert result.returncode == 0, result.stderr
    assert done(result.stdout)["prompt_tokens"] > 2048 and done(result.stdout)["new_tokens"] > 0
    stretched = triforce("generate", text, *wanted, "--approximate", "h2o", "--extend-context")
    assert stretched.returncode == 0 and "YaRN" not in stretched.stderr
    assert not list((tmp_path / "home").rglob("prompts/*"))
    again = triforce("generate", text, *wanted, "--approximate", "h2o", env=more)
    assert done(again.stdout)["restored_tokens"] == 0


@pytest.mark.parametrize("option", [{"approximate": "h2o"}, {"kv": "q8"}])
def test_no_profile_chooses_one(triforce, written, option):
    profile = {"name": "mine", "description": "", "device": "cpu", "gpus": 0}
    path = written(profile | {"options": option})
    assert_error(triforce(*PROMPT, "--profile", path), 2, next(iter(option)), "options")
    plain = written(profile | {"options": {"method": "lookup"}})
    result = triforce(*PROMPT, *SMALL, "--profile", plain, "--approximate", "h2o", "--json")
    assert done(result.stdout)["method"] == "ar"


def test_quantised_keys_take_less_host_memory(triforce):
    more = ("-n", "300", "--link", "5", "--offload", "hybrid", "--resident-layers", "1", "--dry-run", "--json")
    plans = [json.loads(triforce(*PROMPT, *more, "--kv", kv).stdout)["plan"] for kv in ("q8", "bf16")]
    small, large = (plan["memory"]["host"]["total"] for plan in plans)
    assert 0 < small < large / 2
