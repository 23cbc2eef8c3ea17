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


def test_help_of_generate_fits_a_screen_or_two(triforce, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = triforce("generate", "--help").stdout.splitlines()
    assert len(lines) < 136
    first = next(number for number, line in enumerate(lines) if line.startswith("╭─ Options"))
    names = [line.split()[1] for line in lines[first + 1 : first + 12]]
    assert names == [
        *("--prompt-file", "--model", "--max-new-tokens", "--temperature", "--system", "--stop", "--seed"),
        *("--json", "--quiet", "--verbose", "--help"),
    ]
    assert lines[first + 12].startswith("╰")  # one line each
    panels = [line.split("─")[1].strip() for line in lines if line.startswith("╭─ ")]
    assert sorted(panels[2:]) == [
        *("Form of the answer", "Machine", "Many prompts", "Memory and offloading", "Prompt and prompt cache"),
        *("Sampling", "Speculative decoding"),
    ]


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
