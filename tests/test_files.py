"""Files that are written whole or not at all, and what killed processes leave of them."""

import itertools
import os
import subprocess
import sys
import time

import pytest

from offload.system import files
from offload.system.files import TEMPORARY, remove_leftovers, replace_file, temporary_for

KILLED = """
import os, sys, time
from pathlib import Path
from offload.system import files
files.os.fsync = lambda handle: os.kill(os.getpid(), 9)
files.replace_file(Path(sys.argv[1]), b"new")
"""


def parts(folder):
    return sorted(folder.glob(f"{TEMPORARY}*"))


def aged(path, hours):
    moment = time.time() - 3600 * hours
    os.utime(path, (moment, moment))


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path):
    target, other = tmp_path / "chat.json", tmp_path / "other.json"
    target.write_bytes(b"old")
    for path in (target, other):
        assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -9
        remove_leftovers(path)
    assert len(parts(tmp_path)) == 2, "they are too recent"
    assert target.read_bytes() == b"old"
    for path in parts(tmp_path):
        aged(path, 2)
    remove_leftovers(target)
    assert len(parts(tmp_path)) == 1, "that of the other file is not this one's to remove"
    remove_leftovers(other)
    assert parts(tmp_path) == []


def test_a_file_that_is_being_written_is_left_alone(tmp_path):
    handle, name = temporary_for(tmp_path / "out.txt")
    aged(name, 100)  # a prompt may take hours to read
    remove_leftovers(tmp_path / "out.txt")
    assert os.path.exists(name)
    os.close(handle)
    remove_leftovers(tmp_path / "out.txt")
    assert not os.path.exists(name)


def test_an_interrupt_at_any_line_leaves_the_file_whole_and_nothing_beside_it(tmp_path):
    target = tmp_path / "chat.json"
    target.write_bytes(b"old")
    for moment in itertools.count():
        lines = itertools.count()

        def interrupt(frame, event, arg, moment=moment, lines=lines):
            if frame.f_code.co_filename == files.__file__ and event == "line" and next(lines) == moment:
                raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            replace_file(target, b"new")
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
            files.remove_temporaries()  # as at the process's end
        assert os.listdir(tmp_path) == ["chat.json"]
        assert target.read_bytes() in (b"old", b"new")
        target.write_bytes(b"old")
    assert moment > 15


@pytest.mark.parametrize("at", ["open", "flock"])
def test_an_interrupt_as_soon_as_a_temporary_file_exists_removes_it(at, tmp_path, monkeypatch):
    module = {"open": os, "flock": files.fcntl}[at]
    original = getattr(module, at)

    def interrupted(*args, **kwargs):
        original(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "chat.json", b"new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("folder", "error"), [("none", FileNotFoundError), ("text", NotADirectoryError)])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, folder, error):
    (tmp_path / "text").touch()
    with pytest.raises(error) as raised:
        replace_file(tmp_path / folder / "answer.txt", b"text")
    assert raised.value.filename == str(tmp_path / folder / "answer.txt")
