"""The kernel under sanitizers, and its levels of 64-bit ARM by a cross compiler and an emulator: scripts that do so."""

import shutil
import subprocess

import pytest

from tests.support.native_kernel import SOURCE
from tests.support.paths import SCRIPTS

COMPILER = "aarch64-linux-gnu-gcc"


def needs(*programs):
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"there is no {' and no '.join(missing)}")


def run(script):
    """Run a script, which says at its end that all is well."""
    done = subprocess.run([SCRIPTS / script], capture_output=True, text=True)
    assert done.returncode == 0 and "OK: " in done.stderr, done.stdout[-3000:] + done.stderr[-6000:]


@needs("gcc")
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_sanitizers_find_nothing():
    for name in ("libasan.so", "libubsan.so", "libtsan.so"):
        found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        if not found.startswith("/"):  # gcc answers with the bare name where it has no such file
            pytest.skip(f"gcc has no {name}")
    run("check_sanitizers.sh")


@needs(COMPILER)
def test_it_is_valid_for_arm():
    flags = ("-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", "-Wno-psabi", "-pthread")
    assert subprocess.run([COMPILER, *flags, SOURCE], timeout=60).returncode == 0


@needs(COMPILER, "gcc", "qemu-aarch64")
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_results_on_arm_are_those_of_this_processor():
    run("check_arm.sh")
