"""Files of the user's own that are written as a whole."""

import os
import shlex
import stat
from itertools import count

import pytest

from offload.errors import TriforceError
from offload.system.files import remove_temporaries
from tests.support.interrupts import interrupted
from triforce_cli.output import output_files
from triforce_cli.output.output_files import whole_file, write_file


def test_a_file_keeps_its_permissions(tmp_path):
    new, own = tmp_path / "new.txt", tmp_path / "own.txt"
    own.touch(0o600)
    for path in (new, own):
        write_file(path, "text")
        assert path.read_text() == "text"
    (tmp_path / "usual.txt").touch()
    assert new.stat().st_mode == (tmp_path / "usual.txt").stat().st_mode
    assert stat.S_IMODE(own.stat().st_mode) == 0o600


def test_an_interrupt_at_any_line_loses_no_text_that_was_written(tmp_path):
    path = tmp_path / "answer.txt"
    for at in count():
        path.write_text("old")
        is_written = False
        with interrupted(at, output_files, event="line") as hit, whole_file(path) as file:
            file.write("new")
            is_written = True
        remove_temporaries()  # as at the process's end
        assert [each.name for each in tmp_path.iterdir()] == ["answer.txt"]
        assert path.read_text() == ("new" if is_written else "old"), hit
        if not hit:
            break
    assert at > 15


def test_a_text_that_cannot_be_put_in_place_is_left_beside_it(tmp_path, monkeypatch):
    """As of another user's file in a folder like /tmp, which anybody may write to and its owner alone may replace."""

    def refused(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(TriforceError, match="cannot be replaced") as raised, whole_file(tmp_path / "out.txt") as file:
        file.write("hours of work")
    remove_temporaries()  # as at the process's end
    _, kept, target = shlex.split(raised.value.hint.partition(": ")[2])
    with open(kept) as file:
        assert (file.read(), target) == ("hours of work", str(tmp_path / "out.txt"))
