"""The kernel's levels of 64-bit ARM, compiled by a cross compiler and run under an emulator."""

import shutil
import subprocess

import pytest

from tests.support.native_kernel import SOURCE
from tests.support.paths import SCRIPTS

COMPILER = "aarch64-linux-gnu-gcc"


def needs(*programs):
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"there is no {' and no '.join(missing)}")


@needs(COMPILER)
def test_it_is_valid_for_arm():
    flags = ("-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", "-Wno-psabi", "-pthread")
    assert subprocess.run([COMPILER, *flags, SOURCE], timeout=60).returncode == 0


@needs(COMPILER, "gcc", "qemu-aarch64")
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_its_results_are_those_of_this_processor():
    run = subprocess.run([SCRIPTS / "check_arm.sh"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-6000:]
    assert "OK: " in run.stderr
