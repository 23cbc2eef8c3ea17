"""`--draft self`: the same text, what the statistics say of the copy, and refusals where there can be none."""

import json

import pytest

from tests.support.command import assert_error, done
from tests.support.offloading import native_kernel

PROMPT = ("generate", "Once upon a time " * 20, "-n", "8", "--temperature", "0", "--raw", "--dtype", "bfloat16")
needs_kernel = pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")


@needs_kernel
def test_the_text_is_that_of_plain_decoding_and_the_statistics_name_the_copy(triforce):
    plain = triforce(*PROMPT, "--json", "--method", "ar")
    result = triforce(*PROMPT, "--json", "-v", "--method", "retrieval", "--draft", "self:q5")
    assert (text(result.stdout), result.returncode) == (text(plain.stdout), 0)
    last = done(result.stdout)
    assert (last["self_draft"], last["settings"]["draft"]) == ("q5", "self:q5")
    assert 0 < last["self_agreement"] <= 1
    assert "retrieval-q5 -> full" in last["acceptance"]
    assert f"drafts with its weights at q5 ({100 * last['self_agreement']:.0f} % agree)" in result.stderr
    assert "changes the model" not in result.stderr
    assert (done(plain.stdout)["self_draft"], done(plain.stdout)["self_agreement"]) == (None, None)


def text(stdout):
    return "".join(event["text"] for event in map(json.loads, stdout.splitlines()) if event["type"] == "text")


@needs_kernel
def test_a_benchmark_compares_it_with_other_drafters(triforce):
    args = ("bench", "Once upon a time " * 20, "--new", "8", "--repeats", "1", "--temperature", "0", "--json")
    result = triforce(*args, "--dtype", "bfloat16", "--methods", "retrieval,retrieval:self:q4,triforce:none")
    rows = {row["method"]: row for row in json.loads(result.stdout)["methods"]}
    assert list(rows) == ["ar", "retrieval", "retrieval:self:q4", "triforce:none"]
    assert rows["retrieval:self:q4"]["memory_bytes"] > rows["retrieval"]["memory_bytes"]
    assert False not in {row["lossless"] for row in rows.values()}


def test_refusals(triforce):
    bench = ("bench", "Once upon a time", "--methods")
    assert_error(triforce(*bench, "retrieval:model"), 2, "'model' cannot be its drafter", "self:q4")
    assert_error(triforce(*PROMPT, "--draft", "self:q3"), 2, "draft is 'self:q3'", "self:q4")
    assert_error(triforce(*PROMPT, "--draft", "self", "--kernel", "off"), 2, "--draft self needs", "the kernel is off")
    assert_error(triforce(*PROMPT, "--draft", "self", "--method", "naive"), 2, "naive needs a draft model")


def test_a_method_without_a_retrieval_cache_does_not_use_it(triforce):
    result = triforce(*PROMPT, "--draft", "self", "--method", "lookup")
    assert "--draft self is not used: --method lookup drafts by lookup" in result.stderr


def test_a_plan_counts_the_copy(triforce):
    profile = ("profile", "--gpu", "cpu", "--model", "Llama-3.2-1B", "--context", "8K", "--draft")
    result = triforce(*profile, "self:q4")
    assert "quantised copy 0." in result.stdout
    assert "quantised copy" not in triforce(*profile, "lookup").stdout
    embedded = ("profile", "--gpu", "cpu", "--model", "smollm2-135m", "--draft", "self")
    result = triforce(*embedded)
    assert result.returncode == 0 and "quantised copy" not in result.stdout  # its weights are quantised already
    on_gpu = ("profile", "--gpu", "a100", "--model", "Llama-3.1-8B", "--draft", "self")
    assert_error(triforce(*on_gpu), 2, "on a CPU only", "--draft lookup")
