"""Closed pipes, full disks, Ctrl-C and SIGTERM, at any moment, in processes of their own."""

import json
import os
import shlex
import signal
import subprocess
import time

import pytest

from tests.support.command import (
    COMMAND,
    start,
    wait_for_the_first_line,
)


def test_closed_pipe_ends_quietly(endless_model_dir, tmp_path):
    with start(endless_model_dir, tmp_path) as process:
        assert process.stdout.read(20)
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_ctrl_c_keeps_the_text_and_prints_partial_statistics(endless_model_dir, tmp_path):
    with start(endless_model_dir, tmp_path) as process:
        while json.loads(line := process.stdout.readline())["type"] != "text":
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err.decode()
    assert "Traceback" not in err.decode()
    assert len(err.splitlines()) == 1
    *events, done = map(json.loads, [line, *out.splitlines()])
    assert (done["type"], done["finish_reason"]) == ("done", "interrupted")
    assert done["new_tokens"] == events[-1]["tokens"] < 2000


@pytest.mark.daily("0.1", "1.2")
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6, 1.2, 2.5])
def test_ctrl_c_while_starting_is_quiet(endless_model_dir, tmp_path, delay):
    with start(endless_model_dir, tmp_path) as process:
        wait_for_the_first_line(process)
        time.sleep(delay)  # the moment is the point: imports, opening, loading
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.long
def test_help_into_a_closed_pipe_and_output_onto_a_full_disk(triforce, tmp_path):
    for args in ("--help", "generate --help", "profile"):
        command = f"{shlex.join(COMMAND)} {args} | true; exit ${{PIPESTATUS[0]}}"
        assert subprocess.run(["bash", "-c", command], capture_output=True, check=False).returncode == 0
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            command = [*COMMAND, "profile", "--gpu", "cpu"]
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 1
        assert result.stderr.startswith("error: No space left on device")


@pytest.mark.long
def test_sigterm_ends_with_its_own_code(endless_model_dir, tmp_path):
    with start(endless_model_dir, tmp_path) as process:
        assert process.stdout.read(10)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err
