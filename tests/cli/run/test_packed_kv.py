"""`--kv packed`: refused by name where nothing packs keys and values, never called lossy, and counted in plans."""

import json

import pytest

from tests.support.command import assert_error
from tests.support.models import make_hf_model, make_tokenizer

PROMPT = ("generate", "Once upon a time", "-n", "1", "--raw", "--kv", "packed")
PROFILE = ("profile", "--gpu", "cpu", "--model", "Llama-3.1-8B", "--context", "128K")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--dtype", "float32"), ("--kv packed packs keys and values in bfloat16, and the dtype is float32",)),
        (("--dtype", "float16"), ("float16", "--dtype bfloat16")),
        (("--dtype", "bfloat16", "--kernel", "off"), ("--kv packed needs the native kernel",)),
        (("--dtype", "bfloat16"), ("--kv packed packs keys and values of heads of a multiple of 32", "heads of 16")),
    ],
)
def test_a_run_without_what_it_needs_is_refused(triforce, more, words):
    assert_error(triforce(*PROMPT, *more), 2, *words)


def test_a_plan_without_what_it_needs_is_refused(triforce):
    assert_error(triforce(*PROFILE, "--kv", "packed", "--dtype", "float32"), 2, "--kv packed needs bfloat16")


@pytest.mark.parametrize("more", [("--link", "1"), ("--disk", ".", "--memory", "20GiB")], ids=["link", "disk"])
def test_what_a_link_or_a_disk_copies_is_packed_by_default(triforce, more):
    """And not where it is turned off; in one memory, keys and values stay as they are."""
    kinds = {}
    for kv in ("auto", "packed", "bf16"):
        plan = json.loads(triforce(*PROFILE, "--dtype", "bfloat16", "--kv", kv, "--json", *more).stdout)["plan"]
        kinds[kv] = plan["kv"], sum(plan["memory"][tier]["parts"].get("KV cache", 0) for tier in ("host", "disk"))
    assert kinds["auto"] == kinds["packed"] and kinds["auto"][0] == "packed"
    assert kinds["bf16"][0] == "bf16" and 0.75 < kinds["auto"][1] / kinds["bf16"][1] < 0.79
    plan = json.loads(triforce(*PROFILE, "--dtype", "bfloat16", "--json").stdout)["plan"]
    assert plan["kv"] == "bf16"


def test_a_plan_for_a_gpu_has_room_in_64_gib_and_packs_by_default(triforce):
    gpu = ("profile", "--gpu", "4090", "--model", "Llama-2-7B-128K", "--context", "122K")
    gpu += ("--dtype", "bfloat16", "--host-memory", "64GiB")
    said = triforce(*gpu, "--kv", "packed").stdout
    assert said.startswith("fits: ") and "KV cache   packed (--kv): 12.1 bits each, without loss\n" in said
    plan = json.loads(triforce(*gpu, "--json").stdout)["plan"]
    assert plan["kv"] == "packed" and plan["memory"]["host"]["parts"]["KV cache"] < 46 * 2**30
    assert " --kv bf16 " in triforce(*gpu, "--kv", "bf16").stdout.splitlines()[-1]  # else the command would pack


def test_a_plan_for_a_gpu_has_all_keys_and_values_there(triforce):
    on_gpu = (*PROFILE, "--dtype", "bfloat16", "--gpu", "h200", "--json")
    found = [triforce(*on_gpu, "--kv", kv) for kv in ("bf16", "packed")]
    assert all(each.returncode == 0 for each in found), found[1].stderr
    plans = [json.loads(each.stdout) for each in found]
    exact, packed = (plan["plan"]["memory"]["device"]["parts"]["KV cache"] for plan in plans)
    assert packed / exact == pytest.approx(0.78, abs=0.02)


def test_in_a_cpu_s_own_memory_it_has_no_effect_and_a_run_says_so(triforce, tmp_path):
    in_bf16 = (*PROFILE, "--dtype", "bfloat16", "--json")
    plans = [json.loads(triforce(*in_bf16, "--kv", kv).stdout)["plan"] for kv in ("bf16", "packed")]
    parts = [plan["memory"]["device"]["parts"] for plan in plans]
    assert parts[0] == parts[1] and plans[1]["kv"] == "bf16"
    make_hf_model("llama", head_dim=32).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    run = (*PROMPT, "--dtype", "bfloat16", "--temperature", "0", "--model", tmp_path / "model")
    packed, plain = (triforce(*run, "--kv", kv) for kv in ("packed", "bf16"))
    assert packed.stdout == plain.stdout and "--kv packed has no effect here" in packed.stderr


def test_planes_are_of_packed_keys_and_values(triforce):
    planes = (*PROFILE, "--gpu", "4080", "--offload", "planes")
    said = triforce(*planes, "--dtype", "bfloat16", "--quantize", "q4").stdout
    assert "placement  planes: KV of " in said
    assert " --offload planes " in said.splitlines()[-1] and "--middle" not in said
    for more in (("--kv", "bf16", "--dtype", "bfloat16"), ("--dtype", "float32")):
        assert_error(triforce(*planes, *more), 2, "divides packed keys and values")
