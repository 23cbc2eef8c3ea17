"""`scripts/fetch_browser.sh` without a network: where no browser can be had it says why and ends, and tests go on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
USED = ("bash", "dirname", "uname", "mkdir", "rm", "mv", "timeout")
pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("timeout"), reason="it fetches for Linux")


class Checkout:
    """A copy of the scripts, and a PATH with `USED` and the programs of a test alone."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "checkout", folder / "bin"
        self.browser = self.root / ".venv" / "browser" / "chromium"
        shutil.copytree(SCRIPTS, self.root / "scripts")
        self.bin.mkdir()
        for name in USED:
            (self.bin / name).symlink_to(shutil.which(name))

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
        path.chmod(0o755)
        return path

    def limit(self, seconds: int) -> None:
        script = self.root / "scripts" / "fetch_browser.sh"
        text = script.read_text()
        assert text.count("limit=180") == 1
        script.write_text(text.replace("limit=180", f"limit={seconds}"))

    def fetch(self):
        command = [self.bin / "bash", self.root / "scripts" / "fetch_browser.sh"]
        return subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PATH": str(self.bin)}, timeout=500, check=False
        )


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def fetched(checkout, version):
    """Make npm and node such that they fetch and unpack a program that does `version`."""
    program = checkout.program("unpacked-chromium", version)
    calls = checkout.root / "calls"
    checkout.program("npm", f'echo "$*" >>{calls}')
    checkout.program("node", f'mv {program} "$TMPDIR/chromium"; echo "$TMPDIR/chromium"')
    return calls


def test_what_runs_is_kept_and_fetched_once(checkout):
    calls = fetched(checkout, "echo Chromium")
    assert checkout.fetch().returncode == 0
    assert os.access(checkout.browser, os.X_OK) and [path.name for path in checkout.browser.parent.iterdir()] == [
        "chromium"
    ]
    assert "--ignore-scripts" in calls.read_text() and checkout.fetch().returncode == 0
    assert len(calls.read_text().splitlines()) == 1


def test_what_does_not_run_here_is_no_browser(checkout):
    """A missing library, or another processor."""
    fetched(checkout, "echo error while loading shared libraries >&2; exit 127")
    found = checkout.fetch()
    assert found.returncode == 1 and "does not run here" in found.stderr
    assert not checkout.browser.exists()


def test_without_npm_it_says_so(checkout):
    found = checkout.fetch()
    assert (found.returncode, found.stdout) == (1, "")
    assert "there is no npm" in found.stderr and not checkout.browser.parent.exists()


def test_a_registry_that_does_not_answer_ends_it_in_time(checkout):
    checkout.program("npm", f"exec {shutil.which('sleep')} 600")
    checkout.program("node", "exit 1")
    checkout.limit(1)
    found = checkout.fetch()
    assert found.returncode == 1 and "npm could not fetch" in found.stderr
    assert not checkout.browser.exists()
