"""Tiers on the command line: generate and bench follow the plan, and give the same text as without it."""

import json
import warnings

import pytest

from offload.errors import Degraded
from offload.memory.factory import make_link
from tests.support.models import make_hf_model, make_tokenizer
from triforce_cli.app import settle_libraries

PROMPT = "the cat and the dog and the cat and the dog and " * 50  # more tokens than a piece has
GREEDY = ("--raw", "-n", "24", "--temperature", "0")


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
def test_every_placement_gives_the_same_text(triforce_here, placement):
    code, plain, _ = triforce_here("generate", PROMPT, *GREEDY)
    assert code == 0
    code, out, err = triforce_here("generate", PROMPT, *GREEDY, "--link", "5", *placement, "-v")
    assert (code, out) == (0, plain), err
    assert "\nlink      " in err


def test_weights_that_do_not_fit_are_streamed_over_the_link(triforce_here, tmp_path):
    make_hf_model("llama", num_hidden_layers=12).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    args = ("generate", PROMPT, *GREEDY, "--model", tmp_path, "--set", "prefill_chunk=16", "--method", "lookup")
    _, plain, _ = triforce_here(*args)
    tight = ("--link", "5", "--memory", "6800k")
    _, plan, _ = triforce_here(*args, *tight, "--dry-run", "--json")
    assert 0 < json.loads(plan)["plan"]["weight_layers"] < 12
    code, out, err = triforce_here(*args, *tight, "-v")
    assert (code, out) == (0, plain), err
    assert "\nlink      " in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--offload", "stream"), "this device is the CPU"),
        (("--set", "host_share=0.5"), "this device is the CPU"),
        (("--link", "5", "--offload", "host", "--set", "host_share=0"), "host-share goes with hybrid"),
        (("--link", "5", "--memory", "1KiB"), "do not fit"),
        (("--link", "5", "--offload", "stream", "--host-memory", "1KiB"), "host memory"),
        (("--link", "0"), "link is 0"),
        (("--link", "5", "--resident-layers", "3"), "--resident-layers is 3, and 2 layers of this model have"),
    ],
)
def test_impossible_placements_are_refused(triforce_here, args, message):
    for more in ((), ("--dry-run",)):
        code, out, err = triforce_here("generate", PROMPT, *GREEDY, *args, *more)
        assert code in (1, 2)
        assert more or out == ""
        assert message in err and "hint: " in err


def test_degraded_performance_is_a_warning(triforce_here, monkeypatch):
    """As when host memory cannot be pinned; other libraries' warnings are not for the user."""

    def slow_link(*args):
        warnings.warn("memory could not be pinned", Degraded, stacklevel=2)
        warnings.warn("this will be renamed", DeprecationWarning, stacklevel=2)
        return make_link(*args)

    monkeypatch.setattr("offload.api.opened_model.make_link", slow_link)
    args = ("generate", PROMPT, *GREEDY, "--link", "5", "--offload", "stream")
    with warnings.catch_warnings():
        settle_libraries()
        code, _, err = triforce_here(*args)
    assert code == 0
    assert "warning: memory could not be pinned" in err
    assert "renamed" not in err
