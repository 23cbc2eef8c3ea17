"""The command in a separate process, and assertions on its output."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support.terminal import Pty

COMMAND = [sys.executable, "-m", "triforce_cli"]
needs_installation = pytest.mark.skipif(
    next(distributions(name="triforce"), None) is None, reason="this checkout is not installed"
)


STATISTICS = re.compile(r"tokens? read in .* · \d+ written at")


def start(model, home):
    """Start a long generation in a process with pipes: far more JSON than a pipe holds, so that it waits for a reader.

    The tiny model would otherwise have ended before a test that is kept waiting for a processor goes on.
    """
    return subprocess.Popen(
        [*COMMAND, "generate", "Once", "-n", "2000", "--temperature", "1", "--seed", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(home, model),
        pipesize=4096,  # where that can be chosen; it needs 80 KB
        bufsize=0,  # what was not read yet is what `communicate` returns
    )


def wait_for_the_first_line(process):
    """Wait until the command has installed its signal handlers; before that the interpreter handles signals."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        time.sleep(1)
        return
    while process.poll() is None:
        caught = int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:  # the interpreter takes SIGINT only
            return
        time.sleep(0.005)


def environment(home, model):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRIFORCE_")}
    return kept | {
        "TRIFORCE_HOME": str(home / "home"),
        "TRIFORCE_CONFIG": str(home / "config"),
        "TRIFORCE_MODEL": str(model),
        "TRIFORCE_DEVICE": "cpu",
        "TRIFORCE_SEED": "1",  # with others a sampled text may be empty
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home / "hub"),
    }


def assert_error(result, code, *words):
    """Assert one `error:` line, one or several `hint:` lines, nothing else, and nothing on stdout."""
    lines = result.stderr.splitlines()
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert [line.partition(" ")[0] for line in lines[:2]] == ["error:", "hint:"], result.stderr
    assert all(line.startswith("hint: ") for line in lines[1:]), result.stderr
    for word in words:
        assert word in result.stderr


def on_a_terminal(model, home, *args, env=(), stdout=None):
    """Run the command on a pseudo-terminal; return its exit code and everything written to the terminal."""
    pty = Pty(columns=80, rows=24)
    stream = pty.stream()
    command = [*COMMAND, *args]
    settings = environment(home, model) | {"TERM": "xterm-256color"} | dict(env)
    for name in {"NO_COLOR", "FORCE_COLOR", "CI"} - set(dict(env)):
        settings.pop(name, None)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout or stream,
        stderr=stream,
        env=settings,
        timeout=500,
        check=False,
    )
    return done.returncode, pty.output()


def uncolored(output):
    return re.sub(r"\x1b\[[0-9;]*m", "", output)


GREEDY = ("--temperature", "0", "--repetition-penalty", "1.2", "--dtype", "float32")


STORY = ("generate", "Once upon a time", "-n", "80", *GREEDY)


def done(out):
    return json.loads(out.splitlines()[-1])


def refused(result, *words):
    code, out, err = result
    assert (code, out) == (2, "")
    assert [line.partition(": ")[0] for line in err.splitlines()[:2]] == ["error", "hint"]
    assert all(line.startswith("hint: ") for line in err.splitlines()[1:])
    for word in words:
        assert word in err
    return True
