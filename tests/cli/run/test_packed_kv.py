"""Plans with packed keys and values: what is packed by default, how much room that makes, and planes of them."""

import json

import pytest

from tests.support.command import assert_error

PROFILE = ("profile", "--gpu", "cpu", "--model", "Llama-3.1-8B", "--context", "128K", "--dtype", "bfloat16")


def planned(triforce, *more):
    return json.loads(triforce(*PROFILE, *more, "--json").stdout)["plan"]


@pytest.mark.parametrize("more", [("--link", "1"), ("--disk", ".", "--memory", "20GiB")], ids=["link", "disk"])
def test_what_a_link_or_a_disk_copies_is_packed_by_default(triforce, more):
    """And not where it is turned off; in one memory, keys and values stay as they are."""
    kinds = {}
    for kv in ("auto", "packed", "bf16"):
        plan = planned(triforce, "--kv", kv, *more)
        kinds[kv] = plan["kv"], sum(plan["memory"][tier]["parts"].get("KV cache", 0) for tier in ("host", "disk"))
    assert kinds["auto"] == kinds["packed"] and kinds["auto"][0] == "packed"
    assert kinds["bf16"][0] == "bf16" and 0.75 < kinds["auto"][1] / kinds["bf16"][1] < 0.79
    plans = [planned(triforce, *kv) for kv in (("--kv", "bf16"), ("--kv", "packed"), ())]
    assert {plan["kv"] for plan in plans} == {"bf16"}
    assert plans[0]["memory"]["device"]["parts"] == plans[1]["memory"]["device"]["parts"]


def test_a_plan_for_a_gpu_has_room_in_64_gib_and_packs_by_default(triforce):
    gpu = ("--gpu", "4090", "--model", "Llama-2-7B-128K", "--context", "122K", "--host-memory", "64GiB")
    said = triforce(*PROFILE, *gpu, "--kv", "packed", "-v").stdout
    assert said.startswith("fits: ") and "KV cache   packed (--kv): 12.1 bits each, without loss\n" in said
    plan = planned(triforce, *gpu)
    assert plan["kv"] == "packed" and plan["memory"]["host"]["parts"]["KV cache"] < 46 * 2**30
    assert " --kv bf16 " in triforce(*PROFILE, *gpu, "--kv", "bf16").stdout.splitlines()[-1]  # else it would pack


def test_a_plan_for_a_gpu_has_all_keys_and_values_there(triforce):
    plans = [planned(triforce, "--gpu", "h200", "--kv", kv) for kv in ("bf16", "packed")]
    assert all(plan["fits"] for plan in plans)
    exact, packed = (plan["memory"]["device"]["parts"]["KV cache"] for plan in plans)
    assert packed / exact == pytest.approx(0.78, abs=0.02)


def test_planes_are_of_packed_keys_and_values(triforce):
    planes = (*PROFILE, "--gpu", "4080", "--offload", "planes")
    said = triforce(*planes, "--quantize", "q4").stdout
    assert "placement  planes: KV of " in said
    assert " --offload planes " in said.splitlines()[-1] and "--middle" not in said
    for more in (("--kv", "bf16"), ("--dtype", "float32")):
        assert_error(triforce(*planes, *more), 2, "divides packed keys and values")
    assert_error(triforce(*PROFILE, "--kv", "packed", "--dtype", "float32"), 2, "--kv packed needs bfloat16")
