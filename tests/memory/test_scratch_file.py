"""Scratch files: without a name, for their owner alone, gone with their process, and allocated at once."""

import os
import random
import signal
import stat
import subprocess
import sys

import pytest

from offload.errors import OutOfDisk, SettingsError
from offload.system.scratch_file import ScratchFile

SIZE = 5 * 4096 + 17


@pytest.fixture
def file(tmp_path):
    return ScratchFile(tmp_path, SIZE)


def read(file, start, end):
    memory = bytearray(end - start)
    file.read(memoryview(memory), start)
    return memory


def test_it_has_no_name_and_is_the_owners_alone_and_its_space_is_allocated(file, tmp_path):
    found = os.fstat(file.fileno())
    assert not list(tmp_path.iterdir()) and found.st_nlink == 0 and stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= SIZE


def test_calls_that_do_only_a_part_are_continued(file, monkeypatch):
    """The system may read or write less than it was asked for."""
    preadv, pwrite, data = os.preadv, os.pwrite, random.Random(0).randbytes(SIZE)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:1000], at))
    file.write(memoryview(data), 0)
    assert read(file, 0, SIZE) == data and read(file, 4095, 4097) == data[4095:4097]


def test_a_file_that_is_cut_is_an_error_and_no_endless_loop(file):
    os.ftruncate(file.fileno(), 2 * 4096)
    with pytest.raises(OSError, match="ends too early"):
        read(file, 0, 3 * 4096)


def test_a_full_disk_is_an_error_with_the_numbers(tmp_path):
    with pytest.raises(OutOfDisk, match=r"1073741824\.00 GiB needed, .* free") as caught:
        ScratchFile(tmp_path, 2**60)
    assert "--disk" in caught.value.hint


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_path_that_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=name):
        ScratchFile(tmp_path / name, SIZE)


CHILD = """
import sys, time
from pathlib import Path
from offload.system.scratch_file import ScratchFile
file = ScratchFile(Path(sys.argv[1]), 2**20)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
