"""Methods, trees, middle levels, formats and placements on the command line: each gives the text of plain decoding."""

import json
import re
import warnings

import pytest

from offload.errors import Degraded, SettingsError
from offload.memory.factory import make_link
from tests.support.command import done
from tests.support.models import FAMILY_CASES, make_hf_model, make_tokenizer
from triforce_cli.app import settle_libraries
from triforce_cli.run import plan

PROMPT = "the cat and the dog and the cat and the dog and " * 50  # more tokens than a page has
RUN = ("generate", PROMPT, "--raw", "-n", "24", "--temperature", "0")
LINK = ("--link", "5")


def same_text(triforce, more, common=()):
    """Assert that options leave the text as it is; return the last event, and stderr."""
    plain = triforce(*RUN, *common, "--method", "ar")
    result = triforce(*RUN, *common, *more, "--json", "-v")
    assert (plain.returncode, result.returncode) == (0, 0), result.stderr
    texts = [event["text"] for event in map(json.loads, result.stdout.splitlines()) if event["type"] == "text"]
    assert "".join(texts).rstrip("\n") == plain.stdout.rstrip("\n")
    return done(result.stdout), result.stderr


@pytest.mark.parametrize("method", ["auto", "lookup", "naive", "retrieval", "streaming", "triforce"])
def test_every_method(triforce, tiny_model_dir, method):
    sizes = ("--budget", "64", "--draft", tiny_model_dir, "--set", "gamma1=3")
    end, err = same_text(triforce, ("--method", method, *sizes, "--verify"))
    assert (end["method"], end["settings"]["budget"], end["settings"]["gamma1"]) == (method, 64, 3)
    assert end["verify"]["lossless"] and end["verify"]["tokens"] == end["new_tokens"]
    assert end["tokens_per_verification"] >= 1
    assert sum(end["time_share"].values()) == pytest.approx(1, abs=1e-3)
    assert re.search(rf"^method +{method}\b", err, re.M)
    assert err.splitlines()[-1].startswith("verify: ")
    if method != "auto":  # which may find that nothing pays
        assert "→full " in err and "tokens/verification" in err


@pytest.mark.parametrize(
    ("method", "tree", "sampling"),
    [("naive", "9", "top-k"), ("lookup", "auto", "with-replacement"), ("auto", "auto", "without-replacement")],
)
def test_trees(triforce, tiny_model_dir, method, tree, sampling):
    draft = ("--draft", tiny_model_dir if method == "naive" else "lookup", "--set", f"tree_sampling={sampling}")
    end, _ = same_text(triforce, ("--method", method, *draft, "--tree", tree))
    assert (end["settings"]["tree"], end["settings"]["tree_sampling"]) == (tree, sampling)
    if method != "auto":
        (trees,) = end["trees"].values()
        assert trees["nodes"] >= 1 and len(trees["child_acceptance"]) >= 1


def test_a_middle_level_is_chosen_and_an_unused_one_is_named(triforce):
    _, err = same_text(triforce, ("--method", "retrieval", "--middle", "streaming", "--budget", "64"))
    assert "streaming→full" in err and "warning" not in err
    _, err = same_text(triforce, ("--method", "lookup", "--middle", "streaming"))
    assert "--middle streaming is not used: --method lookup" in err


@pytest.mark.parametrize(
    "placement",
    [
        ("--offload", "stream"),
        ("--offload", "hybrid", "--resident-layers", "1"),
        ("--offload", "host"),
        ("--offload", "hybrid", "--set", "host_share=0.5", "--method", "retrieval", "--budget", "64"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kv", ["bf16", "q8"])
def test_every_placement(triforce, placement, kv):
    """And every method on quantised keys and values, whose text is that of plain decoding on them."""
    _, err = same_text(triforce, (*LINK, *placement), ("--kv", kv))
    assert "\nlink      " in err


@pytest.mark.parametrize("method", ["lookup", "streaming"])
def test_quantised_keys_and_values_with_speculation(triforce, method):
    same_text(triforce, ("--method", method, "--budget", "64"), ("--kv", "q8"))


def test_weights_that_do_not_fit_are_streamed_over_the_link(triforce, tmp_path):
    make_hf_model("llama", num_hidden_layers=12).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, tight = ("--model", tmp_path, "--set", "prefill_chunk=16"), (*LINK, "--memory", "6800k")
    planned = json.loads(triforce(*RUN, *model, *tight, "--method", "lookup", "--dry-run", "--json").stdout)["plan"]
    assert 0 < planned["weight_layers"] < 12
    _, err = same_text(triforce, (*tight, "--method", "lookup"), model)
    assert "\nlink      " in err


def test_packed_keys_have_no_effect_in_one_memory_and_a_run_says_so(triforce, tmp_path):
    make_hf_model("llama", head_dim=32).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    _, err = same_text(triforce, ("--kv", "packed"), ("--dtype", "bfloat16", "--model", tmp_path))
    assert "--kv packed has no effect here" in err


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    family, changes = FAMILY_CASES["qwen3-moe"]
    make_hf_model(family, **changes).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return "--model", path


@pytest.mark.parametrize("more", [("--offload", "none", "--verify"), ("--offload", "hybrid", "--method", "lookup")])
def test_experts_in_host_memory_and_the_summary_says_what_they_did(triforce, experts, more):
    end, _ = same_text(triforce, (*LINK, "--experts", "host", *more), experts)
    run = end["experts"]
    assert end["settings"]["experts"] == "host" and run["layers"] == 2
    assert 3 * run["passes"] <= run["experts"] <= 8 * run["passes"] and run["bytes"] > 0
    if "--verify" in more:
        assert end["verify"]["equal"] and "experts in host memory" in end["verify"]["compared_with"]


def test_a_dry_run_says_where_the_experts_are(triforce, experts):
    args = (*RUN, *experts, *LINK, "--experts", "host", "--dry-run")
    planned = json.loads(triforce(*args, "--json").stdout)["plan"]
    assert (planned["experts"], planned["expert_layers"]) == ("host", 0)
    assert planned["memory"]["host"]["parts"]["experts"] > 0
    assert "of 2 of 2 layers in host memory" in triforce(*args).stdout


def test_experts_are_refused_without_the_rates_that_a_plan_needs(triforce, experts, monkeypatch):
    def unknown(*args):
        raise SettingsError("no rates are known", "name a profile")

    monkeypatch.setattr(plan, "rated_profile", unknown)
    assert triforce(*RUN, *experts, *LINK).returncode == 0
    result = triforce(*RUN, *experts, *LINK, "--experts", "host")
    assert result.returncode == 2 and "no rates are known" in result.stderr


def test_degraded_performance_is_a_warning(triforce, monkeypatch):
    """As when host memory cannot be pinned; other libraries' warnings are not for the user."""

    def slow_link(*args):
        warnings.warn("memory could not be pinned", Degraded, stacklevel=2)
        warnings.warn("this will be renamed", DeprecationWarning, stacklevel=2)
        return make_link(*args)

    monkeypatch.setattr("offload.api.loading.make_link", slow_link)
    with warnings.catch_warnings():
        settle_libraries()
        result = triforce(*RUN, *LINK, "--offload", "stream")
    assert result.returncode == 0
    assert "warning: memory could not be pinned" in result.stderr and "renamed" not in result.stderr
