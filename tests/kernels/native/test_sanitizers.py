"""The kernel under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: scripts/check_sanitizers.sh."""

import shutil
import subprocess

import pytest

from tests.support.paths import SCRIPTS

RUNTIMES = ("libasan.so", "libubsan.so", "libtsan.so")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_sanitizers_find_nothing():
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    for name in RUNTIMES:
        found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        if not found.startswith("/"):  # gcc answers with the bare name where it has no such file
            pytest.skip(f"gcc has no {name}")
    run = subprocess.run([SCRIPTS / "check_sanitizers.sh"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert "OK: no" in run.stderr
