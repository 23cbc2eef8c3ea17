"""The command itself: help, version, completion, and tracebacks for those who ask."""

import os
import re
import subprocess
import sys

from tests.support.command import (
    COMMAND,
)


def test_help_answers_with_examples(triforce, process):
    for command in ("generate", "summarize", "bench", "pull", "profile", "doctor"):
        result = (process if command == "generate" else triforce)(command, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert "Examples" in result.stdout
        assert f"triforce {command}" in result.stdout


def test_version():
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"triforce \d+\.\d+\.\d+\S*\n", result.stdout)


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
