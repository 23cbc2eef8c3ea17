"""`--dry-run` and `--memory`: the plan before anything is loaded, and a memory limit that is enforced."""

import json
import shlex

import pytest

from tests.support.command import (
    assert_error,
)


def test_a_dry_run_prints_the_plan_and_loads_nothing(triforce, tiny_model_dir, tmp_path):
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for command, args in (("generate", ()), ("bench", ("--new", "8"))):
        args = ("Once upon a time", "--dry-run", "--model", tmp_path, *args)
        result = triforce(command, *args)
        assert (result.returncode, result.stderr) == (0, "")
        assert "placement  none: everything on the device" in result.stdout
        line = triforce(command, *args, "--json").stdout
        plan = json.loads(line)["plan"]
        assert plan["fits"]
        assert plan["memory"]["device"]["total"] == sum(plan["memory"]["device"]["parts"].values())


def test_a_dry_run_leaves_the_answers_file_alone(triforce, tmp_path):
    book, answer = tmp_path / "book.txt", tmp_path / "answer.txt"
    book.write_text("The cat sat on the mat. " * 20)
    answer.write_text("an answer")
    for command in ("generate", "summarize"):
        result = triforce(command, "-f", book, "--dry-run", "--output", answer)
        assert result.returncode == 0 and "placement " in result.stdout
        assert answer.read_text() == "an answer"


def test_a_dry_run_that_does_not_fit(triforce):
    for command in ("generate", "bench"):
        result = triforce(command, "Once upon a time", "-n", "50", "--dry-run", "--memory", "100K", "--offload", "none")
        assert result.returncode == 1
        assert result.stdout.startswith("does not fit: ")
        assert "triforce" not in result.stdout
        error, hint = result.stderr.splitlines()
        assert error.startswith("error: ")
        assert "may be used" in error
        assert hint.startswith("hint: ")


def test_a_memory_limit_is_enforced(triforce):
    assert_error(triforce("generate", "hi", "-n", "5", "--memory", "1000"), 1, "not enough memory")
    assert_error(triforce("generate", "hi", env={"TRIFORCE_MEMORY": "1KB"}), 1, "not enough memory")


@pytest.mark.parametrize("command", ["generate", "summarize", "bench"])
def test_a_dry_run_ends_with_its_own_command(triforce, tmp_path, command):
    """The line runs as it stands."""
    book = tmp_path / "book.txt"
    book.write_text("The cat sat on the mat. " * 20)
    asked = {
        "generate": ["--prompt-file", book, "Who sat?", "--system", "Be brief."],
        "summarize": [book, "--length", "20", "--from", "10%", "--no-cache"],
        "bench": ["--prompt-file", book, "--methods", "ar,lookup", "--repeats", "1"],
    }[command]
    line = triforce(command, *asked, "--dry-run", "--budget", "64", "-n", "8", "--seed", "3").stdout.splitlines()[-1]
    program, *args = shlex.split(line)
    assert (program, args[0]) == ("triforce", command)
    assert {str(book), "8", "3", "64", *map(str, asked)} <= set(args)
    assert "--dry-run" not in args
    again = triforce(*args, "--dry-run")
    assert again.returncode == 0 and sorted(shlex.split(again.stdout.splitlines()[-1])) == sorted(shlex.split(line))
    done = triforce(*args)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.long
def test_the_command_of_a_plan_extends_the_context_and_names_the_draft(triforce, tmp_path, tiny_model_dir):
    book = tmp_path / "book.txt"
    book.write_text("The cat sat on the mat. " * 900)
    for command in ("generate", "bench"):
        args = (command, "-f", book, "--extend-context", "-n", "4", "--set", "prefill_chunk=256")
        args += ("--draft", tiny_model_dir) if command == "generate" else ("--methods", "ar", "--repeats", "1")
        line = triforce(*args, "--dry-run").stdout.splitlines()[-1]
        words = shlex.split(line)[1:]
        assert "--extend-context" in words
        assert command == "bench" or words[words.index("--draft") + 1] == str(tiny_model_dir)
        done = triforce(*words)
        assert done.returncode == 0, done.stderr
        assert "the context is extended" in done.stderr
    assert_error(triforce("generate", "-f", book, "-n", "4"), 2, "in parts: `triforce generate -f")


def test_the_command_of_a_profile_runs(triforce, tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("The cat sat on the mat. " * 20)
    shown = triforce("profile", "--gpu", "cpu", "--model", tiny_model_dir, "--draft", tiny_model_dir, "--context", "1K")
    words = shlex.split(shown.stdout.splitlines()[-1])[1:]
    done = triforce(*words, "-n", "4")
    assert done.returncode == 0, done.stderr


def test_a_draft_that_no_method_uses_is_a_warning(triforce, tmp_path):
    text = ("Once upon a time", "-n", "2", "--draft", "someone/draft")
    for method, why in (("ar", "uses no drafter"), ("lookup", "drafts by lookup")):
        done = triforce("generate", *text, "--method", method)
        assert done.returncode == 0
        assert f"warning: --draft someone/draft is not used: --method {method} {why}" in done.stderr
    done = triforce("bench", *text, "--methods", "ar", "--repeats", "1")
    assert "--draft someone/draft is not used" in done.stderr
    assert "not used" not in triforce("generate", "Once", "-n", "2", "--method", "ar").stderr


def test_profile_and_generate_take_the_same_budget(triforce, tmp_path, tiny_model_dir):
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 80_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = ("--model", tmp_path, "--method", "retrieval", "--json")
    run = json.loads(triforce("generate", "Once", "-n", "45000", "--dry-run", *shared).stdout)["plan"]
    plan = json.loads(triforce("profile", "--gpu", "cpu", "--context", str(run["context"]), *shared).stdout)["plan"]
    assert run["budget"] == plan["budget"] == 2048
    assert "--budget" not in [*run["flags"], *plan["flags"]]
