"""Plans for several machines: bytes and seconds by the formula, and what the command prints of them."""

import json
from dataclasses import replace

import pytest

from offload.architecture.known_models import KNOWN
from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.planning.nodes import plan_nodes
from offload.planning.plan import make_plan
from offload.planning.request import PlanRequest
from offload.planning.roofline import ALL_REDUCE_S
from tests.support.command import assert_error

MILLION = 1_000_000


@pytest.fixture(scope="module")
def alone():
    hardware = describe(profiles.load("h100"))
    return make_plan(PlanRequest("Llama-3.1-8B", KNOWN["Llama-3.1-8B"], MILLION, hardware, prefill_chunk=4096))


def test_reading_is_divided_and_the_exchange_is_that_of_the_others_keys_and_values(alone):
    (four,) = plan_nodes(alone, [4])
    kv = 2 * 32 * 8 * 128 * 2 * MILLION  # keys and values, layers, heads, numbers, bytes
    assert four.exchanged == pytest.approx(0.75 * kv * alone.request.kv_bytes(1) / (kv / MILLION), rel=1e-3)
    assert four.exchange_s == pytest.approx(four.exchanged / 50e9) and four.hides_exchange
    assert four.attention_s == pytest.approx(2 * 32 * 32 * 128 * MILLION**2 / 4 / (989.4e12 * 0.6), rel=1e-3)
    assert four.ttft_s == pytest.approx(alone.ttft.seconds / 4, rel=0.03)
    assert alone.offload != "none" and four.share.offload == "none"


def test_a_slow_link_is_what_reading_waits_for(alone):
    fast, slow = (plan_nodes(alone, [8], link)[0] for link in (50e9, 0.5e9))
    assert not slow.hides_exchange
    assert slow.ttft_s - fast.ttft_s == pytest.approx(slow.exchange_s - fast.attention_s)
    assert slow.by_heads.ttft.seconds > slow.ttft_s > fast.by_heads.ttft.seconds > fast.ttft_s


def test_a_further_token_merges_each_layer(alone):
    two, eight = plan_nodes(alone, [2, 8], 1e15)
    for node, doublings in ((two, 1), (eight, 3)):
        assert node.tbt_s - node.share.plain.tbt.seconds == pytest.approx(32 * doublings * ALL_REDUCE_S, rel=1e-3)
    assert eight.by_heads.plain.tbt.seconds < eight.tbt_s < two.tbt_s


def test_more_machines_fit_what_one_does_not(alone):
    hardware = replace(alone.request.hardware, host_memory=0)
    small = make_plan(replace(alone.request, hardware=hardware))
    (four,) = plan_nodes(small, [4])
    assert not small.fits and four.fits


def test_the_command(triforce_here):
    args = ("profile", "--gpu", "h100", "--model", "LWM-Text-Chat-1M", "--context", "1M", "--nodes", "2,8")
    text = triforce_here(*args).stdout
    assert text.count("tokens shared (planned only)") == text.count("heads shared (torchrun)") == 2
    assert "nodes 8 " in text and "behind attention" in text
    nodes = json.loads(triforce_here(*args, "--json", "--node-link", "1.25").stdout)["plan"]["nodes"]
    assert [each["count"] for each in nodes] == [2, 8] and nodes[1]["gains"][0] > 1
    assert not nodes[1]["hides_exchange"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--nodes", "1"), ("--nodes '1'", "2 to 1,024")),
        (("--nodes", "4,x"), ("--nodes '4,x'",)),
        (("--nodes", "4", "--compare"), ("--nodes is not a column",)),
        (("--node-link", "10"), ("--node-link needs --nodes",)),
    ],
)
def test_wrong_numbers(triforce_here, args, words):
    gpu = () if "--compare" in args else ("--gpu", "h100")
    assert_error(triforce_here("profile", *gpu, *args), 2, *words)
