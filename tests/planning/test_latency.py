"""Predicted step times against those that the TriForce paper publishes."""

from dataclasses import replace
from math import ceil

import pytest

from offload.architecture.known_models import KNOWN
from offload.architecture.pages import COPY_S
from offload.hardware.rates import READ
from offload.planning.inputs import PlanInputs
from offload.planning.latency import first_selection
from offload.planning.passes import Passes
from offload.planning.placement import place
from offload.planning.plan import make_plan
from offload.planning.roofline import (
    AWAY_LAUNCHES,
    LAUNCH_S,
    LAUNCHES,
    PAGE_ATTENTION_S,
    PAGE_S,
    Pass,
    pass_time,
)
from offload.settings.config import Placement, Speculation
from offload.units import GIB
from scripts.papers import TABLES, by_authors, reference_token_s
from tests.support.planning import HARDWARE, request

NO_WORK = Pass(1)
LONG = 127 * 1024  # tokens: the paper's prompts, off-chip


ON_CHIP = 122 * 1024


# TriForce, arXiv 2404.11912, table 2: 4K of 122K tokens, at temperatures of 0 and .6, a token.
ACCEPTANCE, AT_0_6 = 0.9234, 0.9137
LEVEL_1 = 0.23  # of JackFram/llama-68m's tokens, one at a time (A100_Ablation_graph_chain_retrieval.csv)


def published(
    model, hardware, method, tokens=LONG, layers=None, budget=4096, gamma=None, offload="stream", rate=AT_0_6
):
    """The paper's set-up: its own offloading streams everything; the draft model drafts one token at a time."""
    draft = "JackFram/llama-68m" if method == "triforce" else "lookup"
    speculation = Speculation(method=method, draft=draft, budget=budget, gamma1=1, gamma2=gamma)
    placement = Placement(offload=offload, resident_layers=layers)
    models = {"draft": KNOWN["Llama-68M"], "acceptance": rate, "draft_acceptance": LEVEL_1}
    return make_plan(PlanInputs(model, KNOWN[model], tokens, HARDWARE[hardware], placement, speculation, **models))


@pytest.mark.parametrize(
    ("model", "hardware", "layers", "milliseconds"),
    [
        ("Llama-2-7B-128K", "2x-rtx-4090", 12, 840),
        ("LWM-Text-Chat-128K", "2x-rtx-4090", 12, 840),
        ("Llama-2-7B-128K", "rtx-4090", 0, 2434),  # the reference keeps nothing on a single GPU
        ("Llama-2-13B-128K", "2x-rtx-4090", None, 1794),  # how many stay is not published: as many as fit
    ],
)
def test_plain_decoding_with_offloading_takes_the_published_time(model, hardware, layers, milliseconds):
    plan = published(model, hardware, "ar", layers=layers)
    assert plan.fits
    assert plan.plain.tbt.bound == "link"
    assert plan.plain.tbt.seconds * 1000 == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(
    ("model", "hardware", "layers", "budget", "gamma", "milliseconds"),
    [
        ("Llama-2-7B-128K", "2x-rtx-4090", 9, 12288, 16, 108),
        ("LWM-Text-Chat-128K", "2x-rtx-4090", 9, 12288, 16, 114),
        ("Llama-2-7B-128K", "rtx-4090", 0, 8192, 12, 312),
        ("Llama-2-13B-128K", "2x-rtx-4090", None, 12288, 16, 226),
    ],
)
def test_triforce_with_offloading_is_slower_by_plan_than_published_by_no_more_than_known(
    model, hardware, layers, budget, gamma, milliseconds
):
    """By no more than 22 %, with the acceptance of a budget of 4,096; .945 a token would explain all of them."""
    plan = published(model, hardware, "triforce", layers=layers, budget=budget, gamma=gamma)
    assert plan.fits
    assert plan.chosen.tbt.bound == "link"
    assert 1.1 < plan.chosen.tbt.seconds * 1000 / milliseconds < 1.22
    nearer = published(model, hardware, "triforce", layers=layers, budget=budget, gamma=gamma, rate=0.945)
    loop = reference_token_s(Passes(nearer.inputs, nearer.placed), nearer.chosen)
    assert loop * 1000 == pytest.approx(milliseconds, rel=0.06)


def test_the_published_ratio_on_chip():
    """A tenth too fast by plan, which the authors' loop explains (the project page gives 54 and 24 ms)."""
    on_chip = {"tokens": ON_CHIP, "gamma": 6, "offload": "none", "rate": ACCEPTANCE}
    plan = published("Llama-2-7B-128K", "a100", "triforce", **on_chip)
    assert plan.fits
    assert plan.placed.resident_layers == 32
    assert 1.05 < plan.speedup / 2.31 < 1.15
    assert plan.plain.tbt.seconds * 1000 == pytest.approx(54, rel=0.15)
    passes = Passes(plan.inputs, plan.placed)
    plain_s, chosen_s = (reference_token_s(passes, each) for each in (plan.plain, plan.chosen))
    assert plain_s / chosen_s == pytest.approx(2.31, rel=0.04)
    assert (1000 * plain_s, 1000 * chosen_s) == pytest.approx((54, 24), rel=0.07)
    assert plan.plain.tbt.bound == "device memory"


@pytest.mark.parametrize(("name", "allowed"), [("temperature", 0.04), ("levels", 0.04), ("sequoia-a100", 0.16)])
def test_the_authors_loop_explains_the_speed_ups_on_chip(name, allowed):
    """TriForce at every temperature and both ablations within 4 %, the naive policy within 12, Sequoia within 16."""
    for row in TABLES[name]():
        if "speedup" in row.published:
            within = 0.12 if row.what.startswith("naive") else allowed
            assert by_authors(row.setup)["speedup"] == pytest.approx(row.published["speedup"], rel=within), row.what


def test_streaming_small_pages_over_a_fast_link_is_bound_by_launches():
    """Llama-3.1-8B at 128K has 26 layers of 128 pages away from an RTX 4090: Python takes longer than a fast link."""
    asked = request(method="ar", placement=Placement(offload="stream", resident_layers=6))
    quick = replace(asked, hardware=replace(asked.hardware, link=800e9, host_bandwidth=1600e9))
    slow, fast = make_plan(asked), make_plan(quick)
    assert slow.plain.tbt.bound == "link"
    assert fast.plain.tbt.bound == "launches"
    together = 800e9 * COPY_S / (4 * 2**20)  # pages of a copy
    page = PAGE_ATTENTION_S + (PAGE_S - PAGE_ATTENTION_S) / ceil(together)
    eager = (32 * LAUNCHES + 26 * AWAY_LAUNCHES) * LAUNCH_S
    assert fast.plain.tbt.seconds == pytest.approx(26 * 128 * page + eager, rel=0.01)


def test_host_attention_is_as_fast_as_the_hosts_cores_but_one():
    """A 4090 beside 8 cores takes 230 to 270 ms a token where 16 would take about 200."""
    asked = request("Llama-2-7B-128K", method="triforce", draft="JackFram/llama-68m")
    asked = replace(asked, draft=KNOWN["Llama-68M"])
    assert asked.hardware.host_cores == 8
    eight, sixteen = (
        make_plan(replace(asked, hardware=replace(asked.hardware, host_cores=cores))) for cores in (8, 16)
    )
    assert eight.offload == "hybrid"
    assert 0.228 < eight.chosen.tbt.seconds < 0.27
    assert 0.19 < sixteen.chosen.tbt.seconds < 0.215
    assert eight.plain.tbt.seconds == pytest.approx(sixteen.plain.tbt.seconds, rel=0.03)  # bound by memory
    work = replace(NO_WORK, hosted=51.2e9 * READ, hosted_flops=7 * 54e9)
    assert pass_time(work, asked.hardware).seconds == pytest.approx(2.0)  # a second to read, and one to compute


def test_the_first_selection_reads_mean_keys_that_a_prefill_by_layers_made_and_else_all_pages():
    """All keys and values of Llama-2-7B at 128K take 2.6 s over the link, mean keys a thirty-second of it."""
    by_layers = request("Llama-2-7B-128K", method="retrieval")
    by_chunks = replace(by_layers, placement=Placement(memory=18 * GIB))
    times = []
    for asked, in_layers in ((by_layers, True), (by_chunks, False)):
        placed = place(asked)
        assert placed.by_layers == in_layers
        times.append(first_selection(Passes(asked, placed)))
    assert 0 < times[0] < 0.6
    assert 2.5 < times[1] < 4
    assert first_selection(Passes(replace(by_layers, speculation=Speculation(method="ar")), place(by_layers))) == 0
