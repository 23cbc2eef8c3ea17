"""A plan on the command line: its flags, and bars."""

import shlex
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from offload.architecture.known_models import KNOWN
from offload.planning.placement import resident_tokens
from offload.planning.plan import make_plan
from offload.settings.config import Placement
from offload.units import GIB
from tests.support.planning import request
from triforce_cli.output.plan_fields import Argument, command_line, flags_of
from triforce_cli.output.plan_report import laid_out
from triforce_cli.output.plan_text import WIDTH, PlanReport, bar, plan_text, quantization_lines


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
    given = plan_text(PlanReport(make_plan(request(placement=Placement(host_memory=64 * GIB)))), drawn=False)
    assert "host       64.00 GiB (--host-memory), " in given
    assert "memory not known" in plan_text(PlanReport(make_plan(request())), drawn=False)


def test_a_plan_names_the_size_and_the_depth_of_its_tree():
    asked = request(gpu="a100", tokens=8192, method="naive", draft="a model", tree="k-ary:3x2x1")
    text = plan_text(PlanReport(make_plan(replace(asked, draft=KNOWN["Llama-3.2-1B"]))), drawn=False)
    assert "a tree of 15, 3 deep, drafted, " in text


def test_a_plan_with_a_tree_has_its_flags():
    asked = request(gpu="a100", tokens=8192, method="naive", draft="a model", tree="auto", tree_sampling="top-k")
    flags = flags_of(make_plan(replace(asked, draft=KNOWN["Llama-3.2-1B"])))
    assert flags[flags.index("--tree") + 1] == "auto"
    assert "tree_sampling=top-k" in flags


def test_a_command_line_has_the_given_arguments_beside_the_plans_flags():
    plan = make_plan(request(gpu="a100", tokens=8192))
    given_ones = [
        Argument(None, ("-- what?",)),
        Argument("--model", ("ignored",)),
        Argument("--profile", ("./my a100.yaml",)),
        Argument("-f", ("a.txt",)),
        Argument("-f", ("b.txt",)),
        Argument("--raw"),
    ]
    line = command_line("generate", plan, given_ones)
    words = shlex.split(line)
    assert words[:2] == ["triforce", "generate"]
    assert words[-7:] == ["-f", "a.txt", "-f", "b.txt", "--raw", "--", "-- what?"]
    assert words.count("--model") == words.count("--profile") == 1
    assert words[words.index("--model") + 1] == "Llama-3.1-8B"
    assert words[words.index("--profile") + 1] == "./my a100.yaml"


def test_a_command_line_keeps_a_list_of_which_the_plan_has_one_value():
    plan = make_plan(request(gpu="a100", tokens=8192, budget=64, gamma1=3))
    lists = [Argument("--budget", ("64,256",), is_list=True)]
    words = shlex.split(command_line("bench", plan, lists))
    assert words[words.index("--budget") + 1] == "64,256" and words.count("--budget") == 1
    assert "gamma1=3" in words


def test_no_more_tokens_fit_than_the_context_has():
    asked = request(gpu="h100", tokens=8192)
    short = replace(asked, shape=replace(asked.shape, context=16384))
    for each, what, before in (
        (asked, "all 131,072 of its context fit", "all 131,072"),
        (short, "all 16,384 of its context fit", "all 16,384"),
        (replace(short, tokens=32768), f"{resident_tokens(asked):,} tokens fit", f"{resident_tokens(asked):,}"),
    ):
        line = list(quantization_lines(make_plan(each)))[-1]
        assert f" {what} with everything on the GPU" in line and line.endswith(f"a weight {before}")


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=7), st.integers(0, 10**12))
def test_bars_are_as_long_as_their_sum(sizes, free):
    whole = sum(sizes) + free
    drawn = bar(sizes, whole, "abcdefg")
    assert len(drawn) == WIDTH
    assert len(drawn.rstrip(".")) == round(WIDTH * sum(sizes) / whole)
    for size, mark in zip(sizes, "abcdefg", strict=False):
        assert abs(drawn.count(mark) - WIDTH * size / whole) <= 1


def test_the_fact_about_the_method_triforce_is_wrapped_between_words():
    text = (
        "triforce   109 ms a token, 9.2 tokens/s, 6.4x; bound by host memory\ntriforce generate -f book.txt --seed 1\n"
    )
    lines = laid_out(text, "█", 40).plain.splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(" ".join(lines[:-1]).split()).startswith(
        "triforce 109 ms a token, 9.2 tokens/s, 6.4x; bound by host memory"
    )
