"""Plans of mixtures of experts on GPUs that cannot hold them, against bounds computed by hand."""

from dataclasses import replace

import pytest

from offload.architecture.known_models import published_bits
from offload.architecture.parameters import WeightBits
from offload.hardware.rates import READ
from offload.planning.pass_work import expert_times
from offload.planning.placement import place, placements
from offload.planning.plan import ANSWER_TOKENS, make_plan
from offload.planning.roofline import COMPUTE, EXPERT_S
from offload.planning.suggestions import suggestions
from offload.settings.config import Placement
from offload.units import GIB
from tests.support.planning import HARDWARE, request

QWEN, OSS = "Qwen3-30B-A3B", "gpt-oss-120b"
QWEN_LAYER = 128 * 3 * 2048 * 768 * 2  # bytes of a layer's experts in bf16
OSS_LAYER = 128 * 3 * 2880 * 2880 * 4.5 / 8  # in MXFP4, with scales of 16 bits
WAYS = ("host", "stream", "hybrid")
LINK, HOST = 25e9, 51.2e9  # bytes a second of a 4090's link, and assumed of its host's memory


def asked(model=QWEN, tokens=4096, way="auto", host=128, **rest):
    placement = Placement(host_memory=host * GIB, experts=way, **rest)
    found = replace(request(model, tokens=tokens, placement=placement, method="ar"), prefill_chunk=2048)
    return replace(found, weight_bits=published_bits(model))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("model", "layers", "each"), [(QWEN, 48, QWEN_LAYER), (OSS, 36, OSS_LAYER)])
def test_bytes_are_those_of_the_experts(model, layers, each, way):
    placed = make_plan(asked(model, way=way)).placed
    kept = layers - placed.away_layers
    assert placed.fits and 0 < kept < layers
    assert placed.host.parts["experts"] == pytest.approx(placed.away_layers * each, rel=1e-6)
    assert placed.device.parts["experts"] == pytest.approx(kept * each, rel=1e-6)
    assert placed.device.total + each > placed.device.limit  # one more layer's would not fit
    assert placed.weight_layers == layers and "KV cache" not in placed.host.parts
    unpacking = {QWEN: 2, OSS: 5}[model] / 128 if way == "hybrid" else 0
    staged = 0 if way == "host" else (2 + unpacking) * each
    assert placed.device.parts.get("staging", 0) == pytest.approx(staged, rel=1e-6)


@pytest.mark.parametrize(("host", "fits"), [(32, False), (64, True), (128, True)])
def test_host_memory_must_hold_the_rest(host, fits):
    plan = make_plan(asked(OSS, way="host", host=host))
    assert plan.fits is fits
    if not fits:
        assert "host memory (experts 4" in plan.shortage()
        assert any(each.text.startswith("--host-memory ") for each in suggestions(plan.request))


@pytest.mark.parametrize(("model", "each", "count", "chosen"), [(QWEN, QWEN_LAYER, 128, 8), (OSS, OSS_LAYER, 128, 4)])
@pytest.mark.parametrize("rows", [1, 9])
def test_times_of_each_way_are_bytes_over_rates(model, each, count, chosen, rows):
    plan = make_plan(asked(model, way="host"))
    times = expert_times(plan.request, plan.placed, rows)
    distinct = count * (1 - (1 - chosen / count) ** rows)
    read = plan.placed.away_layers * each * distinct / count
    assert times.distinct == pytest.approx(distinct)
    assert times.bytes == pytest.approx(read, rel=1e-6)
    assert times.link_s == pytest.approx(read / LINK, rel=1e-6)
    assert read / HOST / READ < times.host_s < 2 * read / HOST / READ
    assert read / 1008e9 < times.device_s < times.link_s / 10


def test_a_prompt_s_experts_are_multiplied_on_the_host_or_travel_once():
    host, stream, hybrid = (make_plan(asked(tokens=32768, way=way)) for way in WAYS)
    operations = 2 * 3 * 2048 * 768 * 8 * 32768 * host.placed.away_layers
    assert host.ttft.bound == "experts on the host"
    assert host.ttft.seconds > operations / HARDWARE["rtx-4090"].host_flops
    for plan in (stream, hybrid):
        assert plan.placed.prefill_order == "layers"
        assert plan.placed.away_layers * QWEN_LAYER / LINK < plan.ttft.seconds < 10


@pytest.mark.parametrize(("model", "each", "chosen"), [(QWEN, QWEN_LAYER, 8), (OSS, OSS_LAYER, 4)])
def test_a_hybrid_s_border_is_where_a_layer_is_copied_in_the_time_of_the_host_s_arithmetic(model, each, chosen):
    plan = make_plan(asked(model, way="hybrid"))
    rows, experts = plan.placed.streamed_rows, plan.request.shape.experts
    operations = 2 * plan.request.shape.expert_parameters * chosen * rows
    host_s = operations / HARDWARE["rtx-4090"].host_flops / COMPUTE + 128 * EXPERT_S
    assert experts.reads_all(rows) and each / LINK == pytest.approx(host_s, rel=0.02)
    assert [plan.placed.experts_way(count) for count in (1, rows - 1, rows, 2048)] == [*["host"] * 2, *["stream"] * 2]


def test_a_hybrid_steps_as_fast_as_the_host_and_reads_prompts_as_fast_as_by_the_link():
    host, stream, hybrid = (make_plan(asked(tokens=32768, way=way)) for way in WAYS)
    assert hybrid.placed.away_layers == stream.placed.away_layers and hybrid.placed.streamed_rows > 100
    assert hybrid.ttft.seconds < 1.01 * stream.ttft.seconds < host.ttft.seconds / 20
    assert stream.plain.tbt.seconds > 1.6 * hybrid.plain.tbt.seconds
    assert hybrid.plain.tbt.seconds < 1.1 * host.plain.tbt.seconds  # two layers more have theirs away
    took = [plan.ttft.seconds + ANSWER_TOKENS * plan.plain.tbt.seconds for plan in (stream, hybrid)]
    assert 1.5 < took[0] / took[1] < 1.7


def test_experts_leave_before_keys_and_values():
    """A step reads all KV, and an expert out of 16: so what has no room is experts."""
    quantised = WeightBits(5.0, 8.5, 5.0)
    plan = make_plan(replace(asked(tokens=40960, memory=20 * GIB), weight_bits=quantised))
    assert plan.placed.away_layers and plan.placed.resident_layers == 48
    kept = make_plan(replace(asked(tokens=40960, memory=20 * GIB, way="device"), weight_bits=quantised))
    assert kept.placed.resident_layers < 48
    assert plan.plain.tbt.seconds < kept.plain.tbt.seconds


def test_without_the_kernel_the_host_runs_no_experts_unasked():
    assert {placed.experts for placed in placements(asked(tokens=512))} == set(WAYS)
    without = replace(asked(tokens=512), host_computes=False)
    assert [placed.experts for placed in placements(without)] == ["stream"]
    assert place(replace(without, placement=Placement(experts="host"))).experts == "host"


def test_nothing_moves_with_offload_none_and_in_dense_models():
    assert place(asked(offload="none")).experts == "device"
    assert not place(asked(offload="none")).fits
    (first, *_) = suggestions(asked(offload="none"))
    assert first.text.startswith("--offload auto, which keeps the experts of 3")
    found = suggestions(asked(way="device", host=8))
    assert all(make_plan(each.request).fits for each in found)
    assert place(request("Llama-3.1-70B")).experts == "device"
