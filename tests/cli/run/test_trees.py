"""`--tree` on the command line."""

import json

import pytest

from tests.support.command import refused

PROMPT = "the cat and the dog and the cat and the dog and "
GREEDY = ("--raw", "--temperature", "0", "-n", "24")


@pytest.mark.parametrize(
    ("method", "tree", "sampling"),
    [("naive", "9", "top-k"), ("lookup", "auto", "with-replacement"), ("auto", "auto", "")],
)
def test_a_tree_does_not_change_the_text(triforce, tiny_model_dir, method, tree, sampling):
    plain = triforce("generate", PROMPT, *GREEDY, "--method", "ar")[1]
    draft = ("--draft", tiny_model_dir if method == "naive" else "lookup")
    more = ("--set", f"tree_sampling={sampling}") if sampling else ()
    code, out, err = triforce(
        "generate", PROMPT, *GREEDY, "--method", method, *draft, "--tree", tree, *more, "--json", "-v"
    )
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert "".join(line["text"] for line in lines if line["type"] == "text").rstrip("\n") == plain.rstrip("\n")
    if method != "auto":  # which may find that nothing pays
        (trees,) = lines[-1]["trees"].values()
        assert trees["nodes"] >= 1 and len(trees["child_acceptance"]) >= 1
    settings = lines[-1]["settings"]
    assert (settings["tree"], settings["tree_sampling"]) == (tree, sampling or "without-replacement")


def test_a_shape_comes_from_flag_environment_and_profile(triforce, tmp_path, monkeypatch):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\ndescription: x\ndevice: cpu\noptions: {tree: 12}\n")
    short = ("generate", "hi", "--raw", "-n", "2", "--json", "--method", "lookup", "--profile", mine)

    def tree(*more):
        code, out, err = triforce(*short, *more)
        assert code == 0, err
        return json.loads(out.splitlines()[-1])["settings"]["tree"]

    assert tree() == "12"
    monkeypatch.setenv("TRIFORCE_TREE", "k-ary:2x2")
    assert tree() == "k-ary:2x2"
    assert tree("--tree", "chain") == "chain"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tree", "bush"), ("'bush'", "auto; chain", "k-ary:2x3x1")),
        (("--tree", "k-ary:2x"), ("'k-ary:2x'",)),
        (("--tree", "0"), ("1 to 1,024",)),
        (("--tree", "k-ary:9x9x9x9"), ("7,380 nodes", "smaller")),
        (("--set", "tree_sampling=top_k"), ("'top_k'", "top-k")),
    ],
)
def test_wrong_shapes_are_refused_with_a_hint(triforce, options, words):
    refused(triforce("generate", "hi", *options), *words)
