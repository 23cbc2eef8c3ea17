"""`generate --batch --ray` on a real cluster of this machine, and after kills."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.command import assert_error

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture
def command(endless_model_dir, tmp_path):
    """Write a batch with one bad line, and return the command that answers it to a file."""
    batch = tmp_path / "prompts.jsonl"
    lines = [{"id": id, "prompt": f"Once {id} upon a time", "temperature": 0} for id in range(12)]
    batch.write_text("".join(f"{line}\n" for line in [*map(json.dumps, lines), "no JSON"]))
    base = [sys.executable, "-m", "triforce_cli", "generate", "--model", str(endless_model_dir), "--batch", str(batch)]

    def of(output, *more):
        return [*base, "-o", str(tmp_path / output), "-n", "200", "--parallel", "2", "--threads", "1", *more]

    return of


def results(path):
    """The lines of a result file by their number; none twice."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    found = {event["line"]: event.get("text") for event in events}
    assert len(found) == len(events)
    return found


def children(process, name):
    """Return the processes of a run that Ray has named so."""
    return [each for each in psutil.Process(process.pid).children(recursive=True) if name in " ".join(each.cmdline())]


def test_a_killed_worker_costs_no_line_and_a_killed_command_resumes(command, tmp_path):
    alone = subprocess.run(command("alone"), capture_output=True, text=True)
    assert alone.returncode == 1, alone.stderr  # one line is no request
    expected, out = results(tmp_path / "alone"), tmp_path / "ray"
    run = subprocess.Popen(command("ray", "--ray", "local"), stderr=subprocess.PIPE, text=True)
    while not (out.exists() and len(out.read_bytes().splitlines()) > 1):  # the first line is the error's
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)
    children(run, "ray::Worker")[0].kill()
    stderr = run.communicate()[1]
    assert run.returncode == 1 and "1 request failed" in stderr, stderr
    assert results(out) == expected

    kept = out.read_text().splitlines(keepends=True)
    out.write_text("".join(kept[:6]) + kept[6][:20])  # as a killed command leaves it
    again = subprocess.run(command("ray", "--ray", "local"), capture_output=True, text=True)
    assert "have a result already" in again.stderr and "cut" in again.stderr
    assert results_of_both(out) == expected


def results_of_both(path):
    """The results of two runs, each of which reports the line that is no request."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [(event["line"], event.get("text")) for event in events if event["type"] == "result"]
    assert len(dict(texts)) == len(texts)
    return dict(texts) | {event["line"]: None for event in events if event["type"] == "error"}


def test_ctrl_c_ends_the_cluster_and_keeps_the_results(command, tmp_path):
    out = tmp_path / "ray"
    run = subprocess.Popen(command("ray", "--ray", "local"), stderr=subprocess.PIPE, text=True)
    while not (out.exists() and len(out.read_bytes().splitlines()) > 1):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)
    started = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    stderr = run.communicate()[1]
    assert run.returncode == 130 and "run the same command again" in stderr, stderr
    assert not psutil.wait_procs(started, timeout=20)[1]


def test_no_cluster_at_an_address(triforce, tmp_path):
    batch = tmp_path / "a.jsonl"
    batch.write_text('{"prompt": "Hello"}\n')
    result = triforce("generate", "--batch", batch, "--ray", "127.0.0.1:1")
    assert_error(result, 2, "--ray 127.0.0.1:1", "ray start --head")
