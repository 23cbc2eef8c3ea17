"""`triforce distill`: the command that trains a head, and what it refuses."""

import json

import pytest

from tests.support.command import assert_error

SMALL = (
    "--tokens",
    "1K",
    "--length",
    "32",
    "--draft-vocab",
    "64",
    "--set",
    "window=32",
    "--depth",
    "2",
    "--steps",
    "4",
)


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents. " * 20)
    return path


def test_a_head_is_trained_and_drafts(triforce, tmp_path, book):
    head = tmp_path / "head"
    code, out, err = triforce("distill", "--data", book, "--output", head, *SMALL, "--save-every", "1e-9")
    assert code == 0, err
    title, columns, *rows = out.splitlines()
    assert (title, columns.split()) == ("held-out acceptance", ["drafted", "token", "temperature", "1", "greedy"])
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert "what the target makes of them: 0 %" in err  # a log has lines where a terminal has a bar
    assert err.count("step ") == 4 and " left" in err and f"--draft {head}" in err
    ask = ("generate", "Once", "-n", "12", "--temperature", "0", "--method")
    drafted = triforce(*ask, "naive", "--draft", head)
    assert drafted.returncode == 0 and drafted.stdout == triforce(*ask, "ar").stdout
    assert "eagle3" in triforce(*ask, "naive", "--draft", head, "-v").stderr
    # all is done: it is measured again
    _, out, err = triforce("distill", "--data", book, "--output", head, *SMALL, "--json")
    found = json.loads(out)
    assert "loss" not in err  # no step was left
    assert found["step"] == 4 and len(found["sampled"]) == len(found["greedy"]) == 2
    assert found["bytes"] == (head / "model.safetensors").stat().st_size


def test_what_cannot_be_trained_is_refused(triforce, tmp_path, book):
    train = ("distill", "--output", tmp_path / "head", "--data", book)
    assert_error(triforce(*train, "--length", "4K"), 2, "less than --length")
    assert_error(triforce(*train, "--written", "2"), 2, "written is 2")
    assert_error(triforce(*train, "--save-every", "0"), 2, "--save-every is 0")
    assert_error(triforce("distill", "--output", tmp_path / "head", "--data", tmp_path / "none.txt"), 2, "none.txt")
    assert_error(triforce("distill", "--output", book), 2, "book.txt is a file")
    assert not (tmp_path / "head").exists()
