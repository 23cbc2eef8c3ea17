"""Files that are written whole or not at all."""

import os
import subprocess
import sys

import pytest

from offload.system import files
from offload.system.files import TEMPORARY, replace_file

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
