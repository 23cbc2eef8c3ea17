"""What a command imports: torch and transformers take seconds, so they are imported only where they are needed."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.terminal import Pty

HEAVY = ("torch", "transformers", "prompt_toolkit", "llguidance")
CODE = """
import json, sys
from triforce_cli.app import run, settle_libraries
settle_libraries()
for args in json.loads(sys.argv[1]):
    code = run(args)
    found = [name for name in {heavy!r} if name in sys.modules]
    print(json.dumps([code, found]), file=sys.stderr)
"""


def imported(home, *commands):
    """Run command lines in one process; return of each its exit code, and which heavy modules were imported by then."""
    command = [sys.executable, "-c", CODE.format(heavy=HEAVY), json.dumps(commands)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIFORCE_")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        env=environment | {"TRIFORCE_HOME": str(home), "TRIFORCE_CONFIG": str(home / "config")},
    )
    return [tuple(json.loads(line)) for line in done.stderr.splitlines() if line.startswith("[")]


@pytest.mark.daily("auto")
@pytest.mark.parametrize("method", ["ar", "lookup", "auto"])
def test_generating_does_without_transformers(method, tiny_model_dir, tmp_path):
    args = ["generate", "the end", "--model", str(tiny_model_dir), "-n", "2", "--method", method]
    assert imported(tmp_path, args) == [(0, ["torch"])]


REFUSED = [
    ["generate", "--prompt-file", "no-such-file.txt", "Hello"],
    ["generate"],
    ["generate", ""],
    ["generate", "Hello", "--model", "no-such-model"],
    ["generate", "Hello", "--model", "no-such-model.gguf"],
    ["generate", "Hello", "--method", "triforce", "--draft", "no-such-model"],
    ["generate", "Hello", "--method", "no-such-method"],
    ["generate", "Hello", "--profile", "no-such-profile"],
    ["generate", "Hello", "--temperature", "-1"],
    ["generate", "Hello", "--no-such-option"],
    ["summarize", "no-such-file.txt"],
    ["summarize"],
    ["chat", "-f", "no-such-file.txt"],
    ["chat", "--session", "no-such-folder/x.json"],
    ["serve", "--host", "0.0.0.0"],
    ["bench", "--prompt-file", "no-such-file.txt"],
    ["bench", "Hello", "--model", "no-such-model"],
    ["pull", "no-such-model"],
]


ANSWERED = [["--help"], ["models"], ["generate", "--help"]]


def test_what_is_refused_or_answered_without_torch(tmp_path):
    expected = [(2, [])] * len(REFUSED) + [(0, [])] * len(ANSWERED) + [(1, [])]
    away = ["generate", "Hello", "--server", "127.0.0.1:1"]
    assert imported(tmp_path, *REFUSED, *ANSWERED, away) == expected


def test_a_spinner_is_shown_before_torch_is_imported(tiny_model_dir, tmp_path):
    """torch's import is replaced by an error: the spinner stands before it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit(7)")
    command = [sys.executable, "-m", "triforce_cli", "generate", "Hello", "--model", str(tiny_model_dir)]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    terminal = Pty()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal.stream(),
        env=os.environ | {"PYTHONPATH": path, "TERM": "xterm"},
        check=False,
    )
    assert (done.returncode, "starting" in terminal.output()) == (7, True)
