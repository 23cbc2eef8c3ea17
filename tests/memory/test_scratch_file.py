"""Scratch files: without a name, for their owner alone, gone with their process; any size, offset and file system."""

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from itertools import pairwise

import pytest

from offload.errors import OutOfDisk, SettingsError
from offload.system import scratch_file
from offload.system.scratch_file import ALIGNMENT, ScratchFile

SIZE = 5 * ALIGNMENT + 17
PIECES = [0, 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT, SIZE]  # borders of reads


@pytest.fixture(params=["direct", "through the page cache"])
def file(request, tmp_path):
    return ScratchFile(tmp_path, SIZE, direct=request.param == "direct")


def content(size=SIZE, seed=0):
    return bytearray(random.Random(seed).randbytes(size))


def write_all(file, data):
    file.write([memoryview(data.ljust(file.size, b"\0"))], 0)


def read(file, start, end):
    memory = bytearray(end - start)
    file.read([memoryview(memory)], start)
    return memory


def test_it_has_no_name_and_is_the_owners_alone(file, tmp_path):
    found = os.fstat(file.fileno())
    assert not list(tmp_path.iterdir()) and found.st_nlink == 0
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_a_system_without_unnamed_files_gets_one_that_is_unlinked_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", 0)
    file, data = ScratchFile(tmp_path, SIZE), content()
    assert not list(tmp_path.iterdir())
    assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    write_all(file, data)
    assert read(file, 0, SIZE) == data


def test_its_space_is_allocated_at_once(file):
    assert os.fstat(file.fileno()).st_blocks * 512 >= SIZE


def test_any_part_is_read_back(file):
    data = content()
    write_all(file, data)
    for start, end in pairwise(PIECES):
        assert read(file, start, end) == data[start:end]
    parts = [bytearray(100), bytearray(2 * ALIGNMENT), bytearray(3)]
    file.read([memoryview(part) for part in parts], 5)
    assert b"".join(parts) == data[5 : 5 + 103 + 2 * ALIGNMENT]


def test_memory_that_is_not_aligned_is_written_in_pieces(file, monkeypatch):
    monkeypatch.setattr(scratch_file, "_PIECE", ALIGNMENT)
    data = content(2 * ALIGNMENT + 1)
    file.write([memoryview(data)[1:]], ALIGNMENT)
    assert read(file, ALIGNMENT, 3 * ALIGNMENT) == data[1:]


def test_calls_that_do_only_a_part_are_continued(file, monkeypatch):
    """The system may read or write less than it was asked for."""
    some = slice(0, ALIGNMENT)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [memoryview(views[0])[some]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [memoryview(views[0])[some]], at))
    data = content()
    write_all(file, data)
    assert read(file, 0, SIZE) == data


def test_a_file_that_is_cut_is_an_error_and_no_endless_loop(file):
    os.ftruncate(file.fileno(), 2 * ALIGNMENT)
    with pytest.raises(OSError, match="ends too early"):
        read(file, 0, 3 * ALIGNMENT)


def test_a_file_system_that_refuses_direct_reads_gets_others(tmp_path, monkeypatch):
    file, preadv = ScratchFile(tmp_path, SIZE), os.preadv
    if not file.is_direct:
        pytest.skip("this file system has none")

    def refusing(fd, views, at):
        if file.is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(fd, views, at)

    data = content()
    write_all(file, data)
    monkeypatch.setattr(os, "preadv", refusing)
    assert read(file, 0, SIZE) == data
    assert not file.is_direct


def test_a_full_disk_is_an_error_with_the_numbers(tmp_path):
    with pytest.raises(OutOfDisk, match=r"1073741824\.00 GiB needed, .* free") as caught:
        ScratchFile(tmp_path, 2**60)
    assert "--disk" in caught.value.hint


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_path_that_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=name) as caught:
        ScratchFile(tmp_path / name, SIZE)
    assert caught.value.hint


CHILD = """
import sys, time
from pathlib import Path
from offload.system.scratch_file import ScratchFile
file = ScratchFile(Path(sys.argv[1]), 2**20)
print("ready", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
