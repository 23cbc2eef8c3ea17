"""Plans: sums of bytes, caps, placements, and suggestions that fit."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.architecture.known_models import KNOWN
from offload.architecture.pages import page_tokens
from offload.errors import OutOfMemory, SettingsError
from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.planning.inputs import PlanInputs
from offload.planning.plan import make_plan
from offload.planning.suggestions import suggestions
from offload.settings.config import Placement, Speculation
from offload.settings.method_sizes import tree_nodes
from offload.settings.placement_settings import OFFLOADS
from offload.units import GIB
from tests.support.planning import HARDWARE, request
from triforce_cli.output.plan_text import PlanReport, plan_text

MODELS = st.sampled_from([name for name in KNOWN if name != "Llama-68M"])


REQUESTS = st.builds(
    PlanInputs,
    model=st.just("any"),
    shape=MODELS.map(KNOWN.__getitem__),
    tokens=st.integers(1, 1 << 20),
    hardware=st.sampled_from(list(HARDWARE.values())),
    placement=st.builds(
        lambda offload, host_share, **others: Placement(
            offload, host_share=host_share if offload in ("auto", "hybrid") else None, **others
        ),
        experts=st.sampled_from(["auto", "device", "host"]),
        offload=st.sampled_from(OFFLOADS),
        memory=st.none() | st.integers(1, 100 * GIB),
        host_memory=st.none() | st.integers(1, 300 * GIB),
        resident_layers=st.none() | st.integers(0, 90),
        host_share=st.none() | st.floats(0, 1),
        link_gb_s=st.none() | st.floats(0.1, 100),
        disk=st.none() | st.just("/mnt"),
        disk_limit=st.none() | st.integers(1, 300 * GIB),
    ),
    speculation=st.builds(
        Speculation,
        method=st.sampled_from(["auto", "ar", "lookup", "retrieval", "triforce"]),
        budget=st.sampled_from([512, 4096, 16384]),
        chunk=st.sampled_from([8, 16, 64]),
        gamma2=st.none() | st.integers(1, 32),
    ),
    prefill_chunk=st.sampled_from([256, 2048]),
    itemsize=st.sampled_from([2, 4]),
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
@example(
    PlanInputs("any", KNOWN["Llama-2-7B-128K"], 1, HARDWARE["2x-rtx-3090"], Placement("auto", resident_layers=0))
)  # one token: a page of every rank
def test_sums_caps_and_times_are_consistent(asked):
    plan = make_plan(asked)
    shape, gpus, where = asked.shape, asked.hardware.gpus, plan.placed
    for tier in (plan.device, plan.host, plan.disk):
        assert tier.total == sum(tier.parts.values())
        assert all(size > 0 for size in tier.parts.values())
        assert tier.missing == 0 or not plan.fits
        if plan.fits and tier.limit is not None:
            assert tier.total <= tier.limit
    if plan.fits and asked.placement.memory is not None:
        assert plan.device.total <= asked.placement.memory
    if plan.fits and asked.placement.host_memory is not None:
        assert plan.host.total <= asked.placement.host_memory
    kept = {
        name: plan.device.parts.get(name, 0) * gpus + plan.host.parts.get(name, 0) + plan.disk.parts.get(name, 0)
        for name in ("weights", "experts", "KV cache")
    }
    slack = gpus * (shape.layers + 1)  # bytes, where they are shared out
    weights = kept["weights"] + kept["experts"]
    assert weights == pytest.approx(shape.parameters * asked.itemsize, abs=2 * slack)
    size = shape.full_attention.kv_bytes(1, asked.itemsize)
    piece = page_tokens(shape.share(gpus), asked.itemsize)  # whole pages
    fixed = shape.fixed_bytes(asked.tokens, asked.itemsize, tree_nodes(asked.speculation), asked.prefill_chunk)
    assert size * asked.tokens - slack <= kept["KV cache"] - fixed <= size * (asked.tokens + piece) + slack
    assert 0 <= where.disk_layers <= shape.kv_layers - where.resident_layers
    assert 0 <= where.resident_layers <= shape.layers
    assert 0 <= where.weight_layers <= shape.layers
    assert 0 <= plan.host_share <= 1
    for time in (plan.ttft, plan.plain.tbt, plan.chosen.tbt):
        assert time.seconds > 0
        assert time.bound in time.resources
    assert plan == make_plan(asked)


@settings(max_examples=12, deadline=None)
@given(REQUESTS)
def test_every_suggestion_fits(asked):
    if make_plan(asked).fits:
        return
    found = suggestions(asked)
    assert len(dict(found)) == len(found) <= 3
    for text, changed in found:
        assert make_plan(changed).fits, text


def test_a_cache_that_fits_stays_on_the_device():
    plan = make_plan(request(gpu="a100"))
    assert (plan.offload, plan.host.total, plan.placed.resident_layers) == ("none", 0, 32)


def test_the_link_and_the_host_share_the_rest():
    hybrid = make_plan(request())
    assert hybrid.offload == "hybrid"
    assert 0 < hybrid.host_share < 1
    for mode in ("stream", "host"):
        alone = make_plan(request(placement=Placement(offload=mode)))
        assert alone.offload == mode
        assert hybrid.plain.tbt.seconds <= alone.plain.tbt.seconds
        assert hybrid.chosen.tbt.seconds <= alone.chosen.tbt.seconds


def test_weights_are_offloaded_last():
    plan = make_plan(request("Llama-2-13B-128K"))
    assert plan.fits
    assert 0 < plan.placed.weight_layers < 40
    assert plan.placed.resident_layers == 0
    assert plan.host.parts["weights"] > 0


def test_prefill_is_in_layer_order_where_layers_fit():
    assert make_plan(request("Llama-2-7B-128K", method="ar")).placed.by_layers
    tight = Placement(memory=15 * GIB)
    assert not make_plan(request("Llama-2-7B-128K", placement=tight, method="ar")).placed.by_layers


def test_requested_values_are_kept():
    asked = request(
        placement=Placement(offload="hybrid", resident_layers=3, host_share=0.25), gamma2=5, method="retrieval"
    )
    plan = make_plan(asked)
    assert (plan.placed.resident_layers, plan.host_share, plan.offload) == (3, 0.25, "hybrid")
    assert (plan.chosen.method, plan.chosen.gamma2) == ("retrieval", 5)


def test_a_refusal_has_the_numbers_and_the_cheapest_suggestions():
    plan = make_plan(request("Llama-2-7B-128K", placement=Placement(offload="none")))
    assert not plan.fits
    assert plan.shortage().startswith("131,072 tokens do not fit: needs 77.")
    assert "KV cache 64.00" in plan.shortage()
    with pytest.raises(OutOfMemory, match=r"23\.28 GiB may be used"):
        plan.require_fit()
    assert suggestions(plan.inputs)[0][0] == "--offload auto"
    host = make_plan(request("Llama-2-7B-128K", placement=Placement(host_memory=30 * GIB)))
    texts = [text for text, _ in suggestions(host.inputs)]
    assert any(text.startswith("--host-memory ") for text in texts)
    assert any("tokens or fewer" in text for text in texts)


def test_a_plan_begins_with_its_verdict():
    def first_line(asked):
        return plan_text(PlanReport(make_plan(asked))).plain.splitlines()[0]

    refused = first_line(request("Llama-2-7B-128K", placement=Placement(offload="none")))
    assert refused == "does not fit: 77.6 of 23.3 GiB of GPU memory, bf16"
    whole = request("Llama-3.1-8B", tokens=32768)
    assert first_line(whole) == "fits: 20.0 of 23.3 GiB of GPU memory, bf16"
    assert first_line(replace(whole, itemsize=4)).endswith("fp32")
    assert "23.3 GiB of GPU memory, 63.9 GiB of host memory, bf16" in first_line(request("Llama-2-7B-128K"))


def test_a_cpu_keeps_everything_unless_its_memory_is_divided():
    cpu = replace(HARDWARE["cpu"], memory=16 * GIB, host_memory=16 * GIB)
    asked = replace(request("SmolLM2-135M", tokens=8192, budget=1024), hardware=cpu)
    assert make_plan(asked).offload == "none"
    divided = make_plan(replace(asked, placement=Placement(offload="stream", resident_layers=0, link_gb_s=25)))
    assert (divided.fits, divided.offload, divided.placed.resident_layers) == (True, "stream", 0)
    slow = replace(divided.inputs.hardware, link=0.25e9)  # as the command line makes it of the placement
    linked = make_plan(replace(divided.inputs, hardware=slow))
    assert linked.plain.tbt.bound == "link"
    assert linked.speedup > 2


def on_disk(**placement):
    cpu = replace(HARDWARE["cpu"], memory=16 * GIB, host_memory=16 * GIB, disk=1e9, disk_free=100 * GIB)
    asked = request("SmolLM2-135M", tokens=8192, budget=1024, placement=Placement(disk="/mnt", **placement))
    return replace(asked, hardware=cpu)


def test_a_disk_takes_the_kv_for_which_memory_is_too_small():
    roomy = make_plan(on_disk())
    assert not roomy.placed.uses_disk and roomy.offload == "none"
    tight = make_plan(on_disk(host_memory=100 * 10**6))
    shape, where = tight.inputs.shape, tight.placed
    assert tight.fits and where.uses_disk and 0 < where.resident_layers < shape.layers
    assert tight.host.total <= 100 * 10**6 < tight.host.total + shape.layer_kv_bytes(8192, 2)
    away = shape.layers - where.resident_layers
    assert tight.disk.total == shape.kv_bytes(8192, 2) * away // shape.layers
    assert tight.plain.tbt.bound == "disk" and tight.plain.tbt.seconds > tight.disk.total / 1e9
    assert tight.speedup > 1.5
    assert make_plan(on_disk(memory=500 * 2**20)).placed.uses_disk  # the KV counts there too
    refused = make_plan(on_disk(host_memory=100 * 10**6, disk_limit=2**20))
    assert "of disk (KV cache" in refused.shortage() and "where 1.0 MiB may be used" in refused.shortage()
    assert any(text.startswith("--set disk_limit=1GiB") for text, _ in suggestions(refused.inputs))


def beside_a_gpu(gigabytes, **changes):
    placement = Placement("stream", disk="/mnt", host_memory=gigabytes * GIB, **changes)
    asked = request("Llama-2-7B-128K", tokens=131072, placement=placement)
    return replace(asked, hardware=replace(asked.hardware, disk=3e9, disk_free=200 * GIB))


def test_beside_a_gpu_the_disk_takes_the_kv_for_which_host_memory_is_too_small():
    plans = [make_plan(beside_a_gpu(size)) for size in (100, 32)]
    assert [plan.placed.uses_disk for plan in plans] == [False, True] and all(plan.fits for plan in plans)
    tight, shape = plans[1], plans[1].inputs.shape
    where, layer = tight.placed, shape.layer_kv_bytes(131072, 2)
    kept = shape.layers - where.resident_layers - where.disk_layers
    assert kept > 0 and 0 < where.resident_layers == plans[0].placed.resident_layers
    assert kept * layer < tight.host.total <= 32 * GIB < tight.host.total + layer
    assert tight.disk.total == where.disk_layers * layer and tight.offload == "stream"
    assert tight.plain.tbt.bound == "disk" and tight.plain.tbt.resources["disk"] == tight.disk.total / 3e9
    assert tight.plain.tbt.resources["link"] == plans[0].plain.tbt.resources["link"] > 0
    assert tight.speedup > 4
    assert "of disk" in make_plan(beside_a_gpu(32, disk_limit=GIB)).shortage()
    without = replace(tight.inputs, placement=replace(tight.inputs.placement, disk=None))
    assert any(text.startswith("--disk ") for text, _ in suggestions(without))


def test_an_unknown_gpu_is_refused():
    bare = profiles.Profile("mine", "", "cuda", 1)
    with pytest.raises(SettingsError, match="profile mine has no rates"):
        describe(bare)
