"""Experts in host memory on the command line: the same text as with all in one memory, and what the statistics say."""

import json

import pytest

from offload.errors import SettingsError
from tests.support.models import FAMILY_CASES, make_hf_model, make_tokenizer
from triforce_cli.run import plan

PROMPT = "the cat and the dog and " * 40
GREEDY = ("--raw", "-n", "16", "--temperature", "0")
LINK = ("--link", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    family, changes = FAMILY_CASES["qwen3-moe"]
    make_hf_model(family, **changes).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("more", [("--offload", "none"), ("--offload", "hybrid", "--method", "lookup")])
def test_the_text_is_that_of_a_model_in_one_memory(triforce_here, folder, more):
    args = ("generate", PROMPT, *GREEDY, "--model", folder)
    _, plain, _ = triforce_here(*args)
    code, out, err = triforce_here(*args, *LINK, "--experts", "host", *more)
    assert (code, out) == (0, plain), err


def test_the_summary_says_what_the_experts_did(triforce_here, folder):
    args = ("generate", PROMPT, *GREEDY, "--model", folder, "--json")
    assert json.loads(triforce_here(*args)[1].splitlines()[-1])["experts"] is None
    code, out, _ = triforce_here(*args, *LINK, "--experts", "host", "--verify")
    done = json.loads(out.splitlines()[-1])
    assert code == 0 and done["settings"]["experts"] == "host"
    assert done["verify"]["equal"] and "experts in host memory" in done["verify"]["compared_with"]
    run = done["experts"]
    assert run["layers"] == 2
    assert 3 * run["passes"] <= run["experts"] <= 8 * run["passes"] and run["bytes"] > 0


def test_a_dry_run_says_where_the_experts_are(triforce_here, folder):
    args = ("generate", PROMPT, *GREEDY, "--model", folder, *LINK, "--experts", "host", "--dry-run")
    plan = json.loads(triforce_here(*args, "--json")[1])["plan"]
    assert (plan["experts"], plan["expert_layers"]) == ("host", 0)
    assert plan["memory"]["host"]["parts"]["experts"] > 0
    assert "of 2 of 2 layers in host memory" in triforce_here(*args)[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--experts", "host"), "this device is the CPU"),
        (("--expert-layers", "1"), "--expert-layers was removed"),
        ((*LINK, "--experts", "all"), "experts is 'all'"),
        ((*LINK, "--experts", "hybrid"), "--experts hybrid was removed"),
        ((*LINK, "--experts", "host", "--approximate", "h2o"), "--approximate h2o"),
    ],
)
def test_what_cannot_be_is_refused(triforce_here, folder, args, message):
    code, out, err = triforce_here("generate", PROMPT, *GREEDY, "--model", folder, *args)
    assert (code, out) == (2, "") and message in err and "hint: " in err


def test_a_model_without_experts_has_none_to_move(triforce_here):
    code, _, err = triforce_here("generate", PROMPT, *GREEDY, *LINK, "--experts", "host")
    assert code == 2 and "--experts host is for a mixture of experts" in err
    assert triforce_here("generate", PROMPT, *GREEDY, "--experts", "device")[0] == 0


def test_experts_asked_for_are_refused_without_the_rates_that_a_plan_needs(triforce_here, folder, monkeypatch):
    def unknown(*args):
        raise SettingsError("no rates are known", "name a profile")

    monkeypatch.setattr(plan, "request_on_this_machine", unknown)
    args = ("generate", PROMPT, *GREEDY, "--model", folder, *LINK)
    assert triforce_here(*args)[0] == 0
    code, _, err = triforce_here(*args, "--experts", "host")
    assert code == 2 and "no rates are known" in err
