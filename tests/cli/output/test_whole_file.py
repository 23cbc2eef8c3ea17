"""Files of the user's own that are written as a whole."""

import os
import stat
from contextlib import suppress

import pytest

from offload.errors import TriforceError
from triforce_cli.output.output_files import whole_file


def test_a_file_keeps_its_permissions(tmp_path):
    new, own = tmp_path / "new.txt", tmp_path / "own.txt"
    own.touch(0o600)
    for path in (new, own):
        with whole_file(path) as file:
            file.write("text")
        assert path.read_text() == "text"
    (tmp_path / "usual.txt").touch()
    assert new.stat().st_mode == (tmp_path / "usual.txt").stat().st_mode
    assert stat.S_IMODE(own.stat().st_mode) == 0o600


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
