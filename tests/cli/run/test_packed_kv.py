"""`--kv packed`: refused by name where nothing packs keys and values, never called lossy, and counted in plans."""

import json

import pytest

from tests.support.command import assert_error

PROMPT = ("generate", "Once upon a time", "-n", "1", "--raw", "--kv", "packed")
PROFILE = ("profile", "--gpu", "cpu", "--model", "Llama-3.1-8B", "--context", "128K")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--dtype", "float32"), ("--kv packed packs keys and values in bfloat16, and the dtype is float32",)),
        (("--dtype", "float16"), ("float16", "--dtype bfloat16")),
        (("--dtype", "bfloat16", "--kernel", "off"), ("--kv packed needs the native kernel",)),
        (("--dtype", "bfloat16"), ("--kv packed packs keys and values of heads of a multiple of 32", "heads of 16")),
        (("--retrieval-kv", "packed"), ("retrieval-kv is 'packed'", "exact, q8, q4, fp8")),
    ],
)
def test_a_run_without_what_it_needs_is_refused(triforce, more, words):
    assert_error(triforce(*PROMPT, *more), 2, *words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--disk", "."), ("--kv packed is for keys and values in memory, and --disk . offloads them",)),
        (("--link", "1"), ("and --link 1",)),
        (("--dtype", "float32"), ("--kv packed needs bfloat16",)),
    ],
)
def test_a_plan_without_what_it_needs_is_refused(triforce, more, words):
    assert_error(triforce(*PROFILE, "--kv", "packed", *more), 2, *words)


def test_a_plan_for_a_gpu_has_all_keys_and_values_there(triforce):
    on_gpu = (*PROFILE, "--dtype", "bfloat16", "--gpu", "h200", "--json")
    found = [triforce(*on_gpu, "--kv", kv) for kv in ("exact", "packed")]
    assert all(each.returncode == 0 for each in found), found[1].stderr
    plans = [json.loads(each.stdout) for each in found]
    exact, packed = (plan["plan"]["memory"]["device"]["parts"]["KV cache"] for plan in plans)
    assert packed / exact == pytest.approx(0.78, abs=0.02)
    refused = triforce(*PROFILE, "--dtype", "bfloat16", "--gpu", "rtx-4090", "--kv", "packed")
    assert "do not fit: needs 29" in refused.stderr and "on the host" not in refused.stderr


def test_a_plan_has_three_quarters_of_the_bytes_and_says_that_nothing_is_lost(triforce):
    in_bf16 = (*PROFILE, "--dtype", "bfloat16")
    plans = [json.loads(triforce(*in_bf16, "--json", "--kv", kv).stdout) for kv in ("exact", "packed")]
    exact, packed = (plan["plan"]["memory"]["device"]["parts"] for plan in plans)
    assert packed.pop("KV cache") / exact.pop("KV cache") == pytest.approx(0.7578, abs=0.01)
    assert packed.pop("retrieval cache") <= exact.pop("retrieval cache")  # a table, with the native kernel
    assert packed == exact
    said = triforce(*in_bf16, "--kv", "packed").stdout
    assert "KV cache   packed (--kv): 12.1 bits each, without loss\n" in said and "changes the answer" not in said
