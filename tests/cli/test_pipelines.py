"""The program among others: the recipes of docs/recipes.md, full disks, slow readers, the schema of the events."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import environment
from tests.support.paths import DATA, ROOT

EVENTS = DATA / "events.jsonl"
STORY = "The cat sat on the mat. The dog saw it, and went away.\n\nIn the evening both were in the house.\n"


def recipes():
    return re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text("utf-8"), re.DOTALL)


@pytest.fixture
def bash(tiny_model_dir, tmp_path):
    """Run a script with `triforce` on the PATH, in a folder with short documents."""
    folder, bin = tmp_path / "work", tmp_path / "bin"
    (folder / "chapters").mkdir(parents=True)
    bin.mkdir()
    (bin / "triforce").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m triforce_cli "$@"\n')
    (bin / "triforce").chmod(0o755)
    for name in ("book.txt", "chapters/1.txt", "chapters/2 and 3.txt"):
        (folder / name).write_text(STORY * (4 if name == "book.txt" else 1))
    (folder / "server.log").write_text(f"{STORY}\nerror: the mat is gone\n" * 20)
    chosen = {"TRIFORCE_MAX_NEW_TOKENS": "12", "TRIFORCE_SEED": "1", "TRIFORCE_TEMPERATURE": "0"}
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"
    python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = environment(tmp_path, tiny_model_dir) | chosen | {"PATH": path, "PYTHONPATH": python}

    def run(script, **more):
        command = ["bash", "-c", f"set -eo pipefail\n{script}"]
        stdin = subprocess.DEVNULL
        result = subprocess.run(
            command, cwd=folder, env=env, stdin=stdin, capture_output=True, timeout=500, check=False, **more
        )
        return result, folder

    return run


@pytest.mark.daily("cat book*")
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: re.sub(r"\W+", " ", recipe)[:40])
def test_recipes(bash, recipe):
    if "jq " in recipe and shutil.which("jq") is None:
        pytest.skip("there is no jq")
    before = time.time()
    result, folder = bash(recipe)
    assert result.returncode == 0, result.stderr.decode()
    made = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mtime >= before - 1]
    made = [path for path in made if path.suffix in (".md", ".jsonl")]
    assert result.stdout or made
    assert all(path.read_bytes().strip() for path in made)
    if "chapters" in recipe and "xargs" in recipe:
        assert {path.name for path in made} == {"1.txt.md", "2 and 3.txt.md"}
        assert len({path.read_bytes() for path in made}) == 1  # two at once do not disturb each other
    if "tee" in recipe:
        assert result.stdout == made[0].read_bytes()
    if "--cache" in recipe:
        assert int(result.stdout.split()[0]) >= 256
    if "events.jsonl" in recipe:
        events = [json.loads(line) for line in made[0].read_text().splitlines()]
        text = "".join(event["text"] for event in events if event["type"] == "text")
        assert result.stdout.decode().startswith(text)


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_reported_and_a_slow_reader_gets_everything(bash):
    result, _ = bash("triforce summarize book.txt > /dev/full")
    assert result.returncode == 1
    assert b"error: No space left on device" in result.stderr and b"Traceback" not in result.stderr
    slow, folder = bash("triforce summarize book.txt --json -n 60 | (sleep 2; cat) > slow.jsonl")
    assert slow.returncode == 0
    kinds = [json.loads(line)["type"] for line in (folder / "slow.jsonl").read_text().splitlines()]
    assert kinds[0] == "section" and kinds[-1] == "done" and "text" in kinds


VARYING = ("text", "finish_reason", "kernel", "profile", "threads", "dtype", "link_bytes", "link_utilisation")


def masked(value, name=""):
    """Replace values that differ between runs and machines by their type."""
    if isinstance(value, dict):
        return (
            {}
            if name in ("acceptance", "accepted_of_drafted", "time_share")
            else {key: masked(each, key) for key, each in value.items()}
        )
    if name in VARYING or isinstance(value, float) or name in ("peak_memory_bytes", "tokens", "new_tokens"):
        return "…"
    measured = ("verifications", "tokens_per_verification", "tbt_p95_s", "tbt_median_s")
    return "…" if name in (*measured, "speedup", "plain_step_s", "cycle_s") else value


def test_events_are_those_of_the_golden_file(triforce_here, tmp_path, monkeypatch):
    """To accept a change of the schema: delete the file, run this, look at what has changed, and document it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(STORY)
    asked = ("--question", "Who sat?", "--temperature", "0", "-n", "8", "--seed", "1", "--profile", "cpu", "--json")
    code, out, err = triforce_here("summarize", "story.txt", *asked)
    assert code == 0, err
    lines = [json.dumps(masked(json.loads(line)), ensure_ascii=False) for line in out.splitlines()]
    found = "\n".join(dict.fromkeys(lines)).replace(os.environ["TRIFORCE_MODEL"], "MODEL") + "\n"
    if not EVENTS.exists():
        EVENTS.write_text(found, "utf-8")
    assert found == EVENTS.read_text("utf-8")
    documented = (ROOT / "docs" / "json-events.md").read_text("utf-8")
    for event in map(json.loads, found.splitlines()):
        assert all(f"`{name}`" in documented for name in event)
