"""A plan on the command line: its flags, and its text."""

import re
import shlex
from dataclasses import replace

from offload.architecture.known_models import KNOWN
from offload.planning.plan import make_plan
from offload.settings.config import Placement
from offload.units import GIB
from tests.support.planning import request
from triforce_cli.output.plan_fields import command_line, flags_of
from triforce_cli.output.plan_text import PlanReport, comparison_text, plan_text


def test_the_flags_of_a_plan_stand_for_it():
    """Weights on the host and a short context, whose KV stays: `--offload none` would ask for the weights too."""
    asked = request("Llama-2-13B-128K", tokens=512, placement=Placement(memory=12 * GIB))
    plan = make_plan(asked)
    assert (plan.offload, plan.fits) == ("none", True)
    assert plan.placed.weight_layers < 40
    flags = flags_of(plan)
    assert flags[flags.index("--offload") + 1] == "auto"
    assert flags[flags.index("--memory") + 1] == "12GiB"
    hybrid = flags_of(make_plan(request(placement=Placement(offload="hybrid", resident_layers=3, host_share=0.25))))
    assert hybrid[4:10] == ["--offload", "hybrid", "--resident-layers", "3", "--set", "host_share=0.25"]
    balanced = make_plan(request(placement=Placement(offload="hybrid")))
    assert balanced.host_share > 0 and not any(
        "host_share" in flag for flag in flags_of(balanced)
    )  # it follows from measured times
    resident = make_plan(request("Llama-3.1-8B", tokens=4096, placement=Placement(host_share=0.3)))
    assert resident.offload == "none" and not any(
        "host_share" in flag for flag in flags_of(resident)
    )  # it goes with hybrid alone


def test_a_plan_says_what_host_memory_it_was_given():
    given = plan_text(PlanReport(make_plan(request(placement=Placement(host_memory=64 * GIB))))).plain
    assert "host       64.00 GiB, " in given
    assert "memory not known" in plan_text(PlanReport(make_plan(request()))).plain


def test_a_plan_names_the_size_and_the_depth_of_its_tree():
    shape = {"tree": "k-ary:3x2x1", "tree_sampling": "top-k"}
    asked = request(gpu="a100", tokens=8192, method="naive", draft="a model", **shape)
    plan = make_plan(replace(asked, draft=KNOWN["Llama-3.2-1B"]))
    assert "a tree of 15, 3 deep, drafted, " in plan_text(PlanReport(plan)).plain
    assert {"k-ary:3x2x1", "tree_sampling=top-k"} <= set(flags_of(plan))


def test_a_command_line_has_the_typed_words_and_the_plans_options():
    plan = make_plan(request(gpu="a100", tokens=8192, gamma1=3))
    typed = ["--model=ignored", "-f", "a.txt", "--profile", "./my a100.yaml", "--set", "gamma1=9", "--set", "sink=8"]
    line = command_line("generate", plan, [*typed, "--raw", "--", "-- what?"])
    words = shlex.split(line)
    kept = ["-f", "a.txt", "--profile", "./my a100.yaml", "--set", "sink=8", "--raw"]
    assert words[:9] == ["triforce", "generate", *kept]
    assert (
        words[-2:] == ["--", "-- what?"]
        and words.count("--model") == words.count("--profile") == 1
        and "--gpu" not in words
    )
    assert words[words.index("--model") + 1] == "Llama-3.1-8B" and "gamma1=3" in words and "gamma1=9" not in words


def test_a_plan_names_every_part_of_its_memories_and_fits_a_terminal():
    plan = make_plan(request("Llama-2-7B-128K"))
    text = plan_text(PlanReport(plan)).plain
    for part in (*plan.device.parts, *plan.host.parts):
        assert re.search(rf"^{re.escape(part)} +[\d.]+", text, re.M)
    assert re.search(rf"^all +{plan.device.total / GIB:.2f} +{plan.host.total / GIB:.2f}$", text, re.M)
    narrow = plan_text(PlanReport(plan), width=60).plain
    assert all(len(line) <= 60 for line in narrow.splitlines())
    assert " ".join(narrow.split())[:500].split()[:20] == text.split()[:20]


def test_plans_are_compared_in_a_table_the_fastest_first():
    plans = [make_plan(request("Llama-3.1-8B", gpu=gpu, tokens=8192)) for gpu in ("rtx-4090", "h100", "a100")]
    plans.append(make_plan(request("Llama-2-7B-128K", placement=Placement(offload="none"))))
    text = comparison_text(plans, 80).plain
    rows = [line.split()[0] for line in text.splitlines() if re.search(r"x$", line)]
    assert rows == sorted(
        rows, key=lambda name: next(p for p in plans if p.inputs.hardware.name == name).chosen.tbt.seconds
    )
    assert len(rows) == 3 and "1 profile too small: " in text
    assert all(len(line) <= 80 for line in text.splitlines())
