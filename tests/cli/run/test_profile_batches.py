"""`triforce profile --batch`: how many sequences fit together, and what it is predicted to bring."""

import json

import pytest

PLAN = ("profile", "--gpu", "a100", "--model", "Llama-2-7B-128K", "--context", "8K", "--method", "retrieval")
PLAN += ("--budget", "1024")


def test_a_line_for_each_size_says_what_it_brings_and_what_does_not_fit(triforce_here):
    code, out, _ = triforce_here(*PLAN, "--batch", "1, 4,64")
    assert code == 0
    head, one, four, many = out.split("placement")[1].splitlines()[1:5]
    assert head.startswith("batches    ") and head.endswith(" sequences fit together")
    assert " 1.00x one after the other; retrieval " in one
    assert four.startswith("batch 4    plain ") and four.endswith("x plain")
    assert many.startswith("batch 64   64 sequences of 8,192 tokens do not fit: needs ")
    assert out.splitlines()[-1].startswith("triforce generate ")


def test_json_has_the_same_and_a_shared_beginning_makes_room(triforce_here):
    plan = json.loads(triforce_here(*PLAN, "--json", "--batch", "4")[1])["plan"]
    batch = plan["batch"]
    shared = json.loads(triforce_here(*PLAN, "--json", "--batch", "4", "--shared-prefix", "7K")[1])["plan"]["batch"]
    assert shared["fitting_sequences"] > 2 * batch["fitting_sequences"] > 8
    assert shared["shared_prefix"] == 7168
    (four,) = batch["sizes"]
    assert four["fits"] and four["missing"] is None
    assert four["memory"]["device"]["parts"]["weights"] == plan["memory"]["device"]["parts"]["weights"]
    assert four["plain_tokens_per_s"] == pytest.approx(4 / four["plain"]["tbt"]["seconds"])
    assert four["plain_gain"] == pytest.approx(four["plain_tokens_per_s"] / plan["plain"]["tokens_per_s"])
    assert four["gain"] == pytest.approx(four["tokens_per_s"] / plan["chosen"]["tokens_per_s"])


def test_speculation_that_does_not_pay_in_a_batch_is_said_so(triforce_here):
    arguments = ("profile", "--gpu", "cpu", "--model", "SmolLM2-135M", "--context", "512", "--batch", "1,8")
    lines = triforce_here(*arguments)[1].splitlines()
    assert any(line.startswith("batch 1 ") and line.endswith("x plain") for line in lines)
    assert any(line.startswith("batch 8 ") and line.endswith("; speculation does not pay") for line in lines)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch", "4,x"], "--batch '4,x' does not list numbers of sequences from 1 to 65,536"),
        (["--batch", "0"], "--batch '0' does not list numbers of sequences"),
        (["--batch", ""], "--batch '' does not list numbers of sequences"),
        (["--compare", "--batch", "2"], "--batch is not a column of --compare"),
        (["--shared-prefix", "1K"], "--shared-prefix needs --batch"),
        (["--batch", "2", "--shared-prefix", "9K"], "--shared-prefix 9,216 is longer than the 8,192 tokens"),
    ],
)
def test_what_is_wrong_is_an_error_with_a_hint(triforce_here, more, message):
    code, out, err = triforce_here(*PLAN, *more)
    assert code != 0 and not out
    assert message in err and "hint: " in err
