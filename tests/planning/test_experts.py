"""Plans of mixtures of experts on GPUs that cannot hold them, against bounds computed by hand."""

from dataclasses import replace

import pytest

from offload.architecture.dims import WeightBits
from offload.architecture.known_models import published_bits
from offload.hardware.rates import READ
from offload.planning.passes import experts_on_host
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
        assert any(text.startswith("--host-memory ") for text, _ in suggestions(plan.inputs))


@pytest.mark.parametrize(("model", "each", "chosen"), [(QWEN, QWEN_LAYER, 8), (OSS, OSS_LAYER, 4)])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_host_reads_the_union_of_the_rows_experts(model, each, chosen, rows):
    plan = make_plan(asked(model, way="host"))
    work = experts_on_host(plan.inputs, rows, plan.placed.away_layers)
    distinct = 128 * (1 - (1 - chosen / 128) ** rows)
    read = plan.placed.away_layers * each * distinct / 128
    assert work.weights == pytest.approx(read, rel=1e-6)
    assert read / HOST / READ < work.seconds(plan.inputs.hardware) < 2 * read / HOST / READ


def test_a_step_takes_what_its_experts_take_and_little_more():
    host = make_plan(asked(way="host"))
    took = experts_on_host(host.inputs, 1, host.placed.away_layers).seconds(host.inputs.hardware)
    assert took < host.plain.tbt.seconds < took + 0.06
    whole = make_plan(asked(way="device"))  # layers with all of their experts travel
    assert whole.plain.tbt.seconds > 10 * host.plain.tbt.seconds


def test_a_prompt_s_experts_travel_once():
    plan = make_plan(asked(tokens=32768))
    assert plan.placed.by_layers and plan.placed.away_layers
    assert plan.placed.away_layers * QWEN_LAYER / LINK < plan.ttft.seconds < 10


@pytest.mark.parametrize(("model", "each", "chosen"), [(QWEN, QWEN_LAYER, 8), (OSS, OSS_LAYER, 4)])
def test_a_layer_is_copied_where_that_takes_the_time_of_the_host_s_arithmetic(model, each, chosen):
    plan = make_plan(asked(model, way="host"))
    rows = plan.placed.streamed_rows
    operations = 2 * plan.inputs.shape.expert_parameters * chosen * rows
    host_s = operations / HARDWARE["rtx-4090"].host_flops / COMPUTE + 128 * EXPERT_S
    assert each / LINK == pytest.approx(host_s, rel=0.02)
    assert [plan.placed.hosts_experts(count) for count in (1, rows - 1, rows, 2048)] == [True, True, False, False]


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
        assert (plan.placed.away_layers, plan.host.total) == (0, 0)


def test_without_the_kernel_the_host_runs_no_experts_unasked():
    without = replace(asked(tokens=512), host_computes=False)
    assert not place(without).away_layers
    assert place(replace(without, placement=Placement(experts="host"))).away_layers


def test_nothing_moves_with_offload_none_and_in_dense_models():
    assert not place(asked(offload="none")).away_layers
    assert not place(asked(offload="none")).fits
    assert suggestions(asked(offload="none"))[0][0] == "--offload auto"
