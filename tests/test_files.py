"""Files that are written whole or not at all: by the program, and the user's own."""

import os
import stat
import subprocess
import sys
from contextlib import suppress

import pytest

from offload.errors import TriforceError
from offload.system import files
from offload.system.files import TEMPORARY, replace_file
from triforce_cli.output.output_files import whole_file

KILLED = """
import os, sys
from pathlib import Path
from offload.system import files
files.os.fsync = lambda handle: os.kill(os.getpid(), 9)
files.replace_file(Path(sys.argv[1]), b"new")
"""


def test_a_killed_process_leaves_the_old_file(tmp_path):
    target = tmp_path / "chat.json"
    target.write_bytes(b"old")
    assert subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False).returncode == -9
    assert target.read_bytes() == b"old"
    assert len(list(tmp_path.glob(f"{TEMPORARY}*"))) == 1
    replace_file(target, b"n", b"ew")
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_goes_wrong_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, name, error):
    def fail(*args):
        raise error

    target = tmp_path / "chat.json"
    target.write_bytes(b"old")
    monkeypatch.setattr(files.os, name, fail)
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        replace_file(target, b"new")
    assert os.listdir(tmp_path) == ["chat.json"] and target.read_bytes() == b"old"


@pytest.mark.parametrize(("folder", "error"), [("none", FileNotFoundError), ("text", NotADirectoryError)])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, folder, error):
    (tmp_path / "text").touch()
    with pytest.raises(error) as raised:
        replace_file(tmp_path / folder / "answer.txt", b"text")
    assert raised.value.filename == str(tmp_path / folder / "answer.txt")


def test_a_file_of_the_user_keeps_its_permissions(tmp_path):
    new, own, usual = (tmp_path / f"{name}.txt" for name in ("new", "own", "usual"))
    own.touch(0o600)
    usual.touch()
    for path in (new, own):
        with whole_file(path) as file:
            file.write("text")
        assert path.read_text() == "text"
    assert new.stat().st_mode == usual.stat().st_mode and stat.S_IMODE(own.stat().st_mode) == 0o600


@pytest.mark.parametrize(("text", "left"), [("hours of work", "hours of work"), ("", "old")])
def test_an_interrupt_keeps_the_text_so_far(tmp_path, text, left):
    path = tmp_path / "answer.txt"
    path.write_text("old")
    with suppress(KeyboardInterrupt), whole_file(path) as file:
        file.write(text)
        raise KeyboardInterrupt
    assert path.read_text() == left and os.listdir(tmp_path) == ["answer.txt"]


def test_a_text_that_cannot_be_put_in_place_is_left_beside_it(tmp_path, monkeypatch):
    """As of another user's file in a folder like /tmp, which anybody may write to and its owner alone may replace."""

    def refused(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(TriforceError, match="cannot be replaced") as raised, whole_file(tmp_path / "out.txt") as file:
        file.write("hours of work")
    with open(raised.value.hint.rpartition(" ")[2]) as file:
        assert file.read() == "hours of work"
