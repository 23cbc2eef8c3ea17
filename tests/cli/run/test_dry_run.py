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


def test_a_dry_run_that_does_not_fit(triforce):
    for command in ("generate", "bench"):
        result = triforce(command, "Once upon a time", "-n", "50", "--dry-run", "--memory", "100K", "--offload", "none")
        assert result.returncode == 1
        assert "which does not fit" in result.stdout
        error, hint = result.stderr.splitlines()
        assert error.startswith("error: ")
        assert "may be used" in error
        assert hint.startswith("hint: ")


def test_a_memory_limit_is_enforced(triforce):
    assert_error(triforce("generate", "hi", "-n", "5", "--memory", "1000"), 1, "not enough memory")
    assert_error(triforce("generate", "hi", env={"TRIFORCE_MEMORY": "1KB"}), 1, "not enough memory")


@pytest.mark.parametrize("command", ["generate", "summarize", "bench"])
def test_a_dry_run_ends_with_its_own_command(triforce, tmp_path, command):
    """The printed command runs once the prompt or the documents are added."""
    book = tmp_path / "book.txt"
    book.write_text("The cat sat on the mat. " * 20)
    asked = [book] if command == "summarize" else ["-f", book]
    line = triforce(command, *asked, "--dry-run", "--budget", "64", "-n", "8").stdout.splitlines()[-1]
    program, *args = shlex.split(line)
    assert (program, args[0]) == ("triforce", command)
    assert not {str(book), "-f", "--dry-run"} & set(args)
    again = triforce(*args, *asked, "--dry-run", "-n", "8")
    assert (again.returncode, again.stderr, again.stdout.splitlines()[-1]) == (0, "", line)
