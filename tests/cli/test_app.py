"""The command itself: help, version, completion, and tracebacks for those who ask."""

import os
import re
import subprocess
import sys

import pytest
import typer

from tests.support.command import COMMAND, needs_installation
from tests.support.paths import ROOT
from triforce_cli.app import _COMMANDS
from triforce_cli.commands.chat import chat
from triforce_cli.commands.generate import generate
from triforce_cli.commands.serve import serve


def test_help_answers_with_examples(triforce, process):
    for command in (each for each in _COMMANDS if each != "cache"):  # a group: its commands have their own
        result = (process if command == "generate" else triforce)(command, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert "Examples" in result.stdout
        assert f"triforce {command}" in result.stdout and "]...]" not in result.stdout


def test_commands_are_in_groups(triforce):
    panels = re.findall("─ ([A-Z][A-Za-z ]+) ─", triforce("--help").stdout)
    assert panels == ["Options", "Read a book", "Serve", "Models and this machine", "Research"]


@needs_installation
def test_version():
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"triforce \d+\.\d+\.\d+\S*\n", result.stdout)


@pytest.mark.long
def test_the_shell_completes_levels_of_the_kernel():
    program = "import sys; sys.argv = ['triforce']; from triforce_cli.entry import main; main()"
    for command in ("generate", "bench", "doctor"):
        line = {"COMP_WORDS": f"triforce {command} --kernel a", "COMP_CWORD": "3"}
        env = os.environ | {"_TRIFORCE_COMPLETE": "complete_bash"} | line
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
        assert result.stdout.split() == ["auto", "avx512", "avx2"]
    line = {"COMP_WORDS": "triforce summarize --length ", "COMP_CWORD": "3"}
    env = os.environ | {"_TRIFORCE_COMPLETE": "complete_bash"} | line
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert result.stdout.split() == ["short", "medium", "long"]


def test_debug_shows_the_traceback(triforce):
    result = triforce("generate", "hi", "--model", "no-such-model", env={"TRIFORCE_DEBUG": "1"})
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "error: no model at no-such-model" in result.stderr


@pytest.mark.parametrize("command", ["generate", "summarize", "chat", "serve", "bench"])
def test_help_shows_the_usual_options_and_the_way_to_the_others(triforce, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    lines = triforce(command, "--help").stdout.splitlines()
    shown = sum(line.startswith("│ --") for line in lines)
    assert 9 <= shown <= 15
    rest = re.search(rf"triforce {command} --help-all shows (\d+) more options", "\n".join(lines))
    whole = triforce(command, "--help-all").stdout.splitlines()
    assert sum(line.startswith("│ --") for line in whole) == shown + int(rest[1])


@pytest.mark.parametrize("function", [generate, chat, serve])
def test_every_option_is_documented(function):
    text = (ROOT / "docs" / "options.md").read_text("utf-8")
    app = typer.Typer(add_completion=False)
    app.command()(function)
    command = typer.main.get_command(app)
    options = [param for param in command.params if param.param_type_name == "option" and "--help" not in param.opts]
    missing = [name for param in options for name in param.opts if f"`{name}`" not in text]
    assert len(options) > 30
    assert missing == []
