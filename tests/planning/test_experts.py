"""Plans of mixtures of experts on GPUs that cannot hold them, against bounds computed by hand."""

from dataclasses import replace

import pytest

from offload.architecture.known_models import KNOWN, published_bits
from offload.architecture.parameters import WeightBits
from offload.architecture.weight_formats import rounded_bits
from offload.hardware.rates import READ
from offload.planning.expert_times import expert_times
from offload.planning.placement import place
from offload.planning.plan import make_plan
from offload.planning.roofline import COMPUTE, EXPERT_S
from offload.planning.suggestions import suggestions
from offload.settings.config import Placement
from offload.units import GIB
from tests.support.planning import HARDWARE, request

QWEN, OSS = "Qwen3-30B-A3B", "gpt-oss-120b"
QWEN_LAYER = 128 * 3 * 2048 * 768 * 2  # bytes of a layer's experts in bf16
OSS_LAYER = 128 * 3 * 2880 * 2880 * 4.5 / 8  # in MXFP4, with scales of 16 bits
LINK, HOST = 25e9, 51.2e9  # bytes a second of a 4090's link, and assumed of its host's memory


def asked(model=QWEN, tokens=4096, way="auto", host=128, **rest):
    placement = Placement(host_memory=host * GIB, experts=way, **rest)
    found = replace(request(model, tokens=tokens, placement=placement, method="ar"), prefill_chunk=2048)
    return replace(found, weight_bits=published_bits(model))


@pytest.mark.parametrize(("model", "layers", "each"), [(QWEN, 48, QWEN_LAYER), (OSS, 36, OSS_LAYER)])
def test_bytes_are_those_of_the_experts(model, layers, each):
    placed = make_plan(asked(model, way="host")).placed
    kept = layers - placed.away_layers
    assert placed.fits and 0 < kept < layers
    assert placed.host.parts["experts"] == pytest.approx(placed.away_layers * each, rel=1e-6)
    assert placed.device.parts["experts"] == pytest.approx(kept * each, rel=1e-6)
    assert placed.device.total + each > placed.device.limit  # one more layer's would not fit
    assert placed.weight_layers == layers and "KV cache" not in placed.host.parts
    staged = (2 + {QWEN: 2, OSS: 5}[model] / 128) * each  # and an expert that is unpacked
    assert placed.device.parts.get("staging", 0) == pytest.approx(staged, rel=1e-6)


def test_weights_without_experts_have_their_own_bits():
    """Of gpt-oss-120b everything else is in bf16: 36 layers' attention and routers, embedding and head."""
    attention = 2880 * (64 + 2 * 8) * 64 + 64 * 64 * 2880
    dense = 2 * (36 * (attention + 128 * 2880) + 2 * 201088 * 2880)
    assert make_plan(asked(OSS, way="host")).device.parts["weights"] == pytest.approx(dense, rel=0.001)


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
    times = expert_times(plan.request, plan.placed.away_layers, rows)
    distinct = count * (1 - (1 - chosen / count) ** rows)
    read = plan.placed.away_layers * each * distinct / count
    assert times.distinct == pytest.approx(distinct)
    assert times.bytes == pytest.approx(read, rel=1e-6)
    assert times.link_s == pytest.approx(read / LINK, rel=1e-6)
    assert read / HOST / READ < times.host_s < 2 * read / HOST / READ
    assert read / 1008e9 < times.device_s < times.link_s / 10


def test_a_verification_reads_the_union_of_its_rows_experts():
    plan = make_plan(replace(asked(way="host"), speculation=request(method="lookup", gamma2=8).speculation))
    one, nine = plan.expert_times
    assert (one.tokens, nine.tokens) == (1, 9) and one.distinct == pytest.approx(8)
    assert nine.distinct == pytest.approx(128 * (1 - (15 / 16) ** 9))  # 56.4, not 72
    assert nine.bytes > 6 * one.bytes
    assert plan.chosen.verify_s > plan.plain.tbt.seconds + nine.host_s - one.host_s - 0.001


@pytest.mark.parametrize("model", [QWEN, OSS])
def test_a_step_takes_what_its_experts_take_and_little_more(model):
    host = make_plan(asked(model, way="host"))
    took = host.expert_times[0].host_s
    assert took < host.plain.tbt.seconds < took + 0.06
    whole = make_plan(asked(model, way="device"))  # layers with all of their experts travel
    assert whole.plain.tbt.seconds > 10 * host.plain.tbt.seconds


def test_a_prompt_s_experts_travel_once():
    plan = make_plan(asked(tokens=32768))
    assert plan.placed.prefill_order == "layers" and plan.placed.experts == "host"
    assert plan.placed.away_layers * QWEN_LAYER / LINK < plan.ttft.seconds < 10


@pytest.mark.parametrize(("model", "each", "chosen"), [(QWEN, QWEN_LAYER, 8), (OSS, OSS_LAYER, 4)])
def test_a_layer_is_copied_where_that_takes_the_time_of_the_host_s_arithmetic(model, each, chosen):
    plan = make_plan(asked(model, way="host"))
    rows = plan.placed.streamed_rows
    operations = 2 * plan.request.shape.expert_parameters * chosen * rows
    host_s = operations / HARDWARE["rtx-4090"].host_flops / COMPUTE + 128 * EXPERT_S
    assert each / LINK == pytest.approx(host_s, rel=0.02)
    assert [plan.placed.experts_way(count) for count in (1, rows - 1, rows, 2048)] == [*["host"] * 2, *["stream"] * 2]


def test_a_batch_shares_what_is_read():
    """16 sequences read 64 % of a layer's experts, not 16 times 8 of them."""
    alone, together = (replace(asked(way="host"), sequences=count) for count in (1, 16))
    one, many = (make_plan(each).expert_times[0] for each in (alone, together))
    assert many.distinct == pytest.approx(128 * (1 - (15 / 16) ** 16))
    assert many.distinct < 0.65 * 16 * one.distinct


def test_experts_leave_before_keys_and_values():
    """A step reads all KV, and an expert out of 16: so what has no room is experts."""
    quantised = WeightBits(5.0, 8.5, 5.0)
    plan = make_plan(replace(asked(tokens=40960, memory=20 * GIB), weight_bits=quantised))
    assert plan.placed.away_layers and plan.placed.resident_layers == 48
    kept = make_plan(replace(asked(tokens=40960, memory=20 * GIB, way="device"), weight_bits=quantised))
    assert kept.placed.resident_layers < 48
    assert plan.plain.tbt.seconds < kept.plain.tbt.seconds


def test_what_fits_stays_on_the_device():
    for gpu, changes in (("h100", {}), ("rtx-4090", {"weight_bits": WeightBits(5.0, 8.5, 5.0)})):
        plan = make_plan(replace(asked(), hardware=HARDWARE[gpu], **changes))
        assert (plan.placed.experts, plan.placed.away_layers, plan.host.total) == ("device", 0, 0)
        assert plan.expert_times == ()


def test_without_the_kernel_the_host_runs_no_experts_unasked():
    without = replace(asked(tokens=512), host_computes=False)
    assert place(without).experts == "device"
    assert place(replace(without, placement=Placement(experts="host"))).experts == "host"


def test_nothing_moves_with_offload_none_and_in_dense_models():
    assert place(asked(offload="none")).experts == "device"
    assert not place(asked(offload="none")).fits
    (first, *_) = suggestions(asked(offload="none"))
    assert first.text.startswith("--offload auto, which keeps ")
    found = suggestions(asked(way="device", host=8))
    assert all(make_plan(each.request).fits for each in found)
    assert place(request("Llama-3.1-70B")).experts == "device"


def test_two_gpus_share_each_expert():
    one, two = (
        make_plan(replace(asked(OSS, way="host"), hardware=HARDWARE[gpu])) for gpu in ("rtx-4090", "2x-rtx-4090")
    )
    each = [plan.host.parts["experts"] / plan.placed.away_layers for plan in (one, two)]
    assert each == pytest.approx([OSS_LAYER, OSS_LAYER], rel=1e-6)
    assert two.placed.away_layers < one.placed.away_layers and two.fits


def test_rounded_weights_have_other_bits_beside_experts_only_where_they_differ():
    """Rows of 2880 numbers are no multiple of 256, so 6 bits become 8; those of 64 * 64, of each head's output, are."""
    rounded = rounded_bits(KNOWN["gpt-oss-20b"], "q6")
    queries, outputs = 2880 * (64 + 2 * 8) * 64, 64 * 64 * 2880
    assert rounded.experts == 8.5
    assert rounded.layers == pytest.approx((8.5 * queries + 6.5625 * outputs) / (queries + outputs))
    assert rounded_bits(KNOWN[QWEN], "q4") == WeightBits(5.0, 8.5)
