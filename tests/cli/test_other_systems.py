"""Commands without all that only POSIX systems have: what Windows would meet, as far as Linux can show it."""

import json
import subprocess
import sys

import pytest

from tests.support.command import environment
from tests.support.paths import ROOT


def test_commands_run_without_what_only_posix_has(tiny_model_dir, tmp_path):
    (book := tmp_path / "book.txt").write_text("The cat sat on the mat. " * 20)
    (tmp_path / "batch.jsonl").write_text('{"prompt": "Once"}\n')
    few = ("-n", "4", "--temperature", "0")
    tiers = ("--disk", str(tmp_path), "--host-memory", "1MiB", "--offload", "stream", "--link", "25")
    commands = [
        ["generate", "-f", str(book), "Who sat?", *few],
        ["generate", "-f", str(book), "Who sat?", *few, *tiers],
        ["generate", "--batch", str(tmp_path / "batch.jsonl"), "--output", str(tmp_path / "out.jsonl"), *few],
        ["summarize", str(book), *few],
        ["chat", *few],
        ["profile", "--model", str(tiny_model_dir)],
        ["pull", str(tiny_model_dir)],
        ["cache", "list"],
    ]  # fmt: skip
    script, report = ROOT / "tests" / "support" / "other_system.py", tmp_path / "report.json"
    settings = environment(tmp_path, tiny_model_dir)
    subprocess.run([sys.executable, script, json.dumps(commands), report], env=settings, cwd=ROOT, check=True)
    for command, (code, output, messages) in zip(commands, json.loads(report.read_text()), strict=True):
        assert code == 0, (command, messages)
        assert output or command[0] not in ("generate", "profile", "cache") or "--output" in command, command
    assert '"type": "result"' in (tmp_path / "out.jsonl").read_text()
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".lock")]


@pytest.mark.long
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_types_hold_on_other_systems(platform):
    """The standard library's stubs know which calls each system has."""
    mypy = subprocess.run([sys.executable, "-m", "mypy", "--platform", platform], cwd=ROOT, capture_output=True)
    assert mypy.returncode == 0, mypy.stdout.decode()
