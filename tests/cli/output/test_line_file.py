"""Files of lines to which a run appends: what is cut from them, and what is never touched."""

from contextlib import closing

import pytest

from offload.errors import SettingsError
from triforce_cli.batch.result_file import ResultFile

RESULT = b'{"type": "result", "id": 1, "line": 1}\n'


@pytest.mark.parametrize("text", [b"milk, eggs", b'{"mine": 1}', b'{"type": "settings"', b"{broken", b"\xff\x00"])
def test_a_foreign_file_of_one_line_is_not_touched(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(SettingsError, match="line 1 is not "):
        ResultFile(path, pytest.fail)
    assert path.read_bytes() == text


def test_a_new_file_to_which_nothing_was_written_is_removed(tmp_path):
    path, link, empty = tmp_path / "out.jsonl", tmp_path / "link", tmp_path / "empty"
    link.symlink_to(path)
    empty.touch()
    for name in (path, link, empty):
        ResultFile(name, pytest.fail).close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "link"]
    with closing(ResultFile(link, pytest.fail)) as file:
        file.write(RESULT.decode())
    assert path.read_bytes() == RESULT


@pytest.mark.parametrize("end", [b'{"ty', b'{"type": "result", "id"', b'{"type": "error", "li', b"\x00\x00"])
def test_a_line_that_was_cut_is_dropped(tmp_path, end):
    path, warnings = tmp_path / "out.jsonl", []
    path.write_bytes(RESULT + end)
    with closing(ResultFile(path, warnings.append)) as file:
        assert file.finished == {1}
    assert path.read_bytes() == RESULT and "cut" in warnings[0]
    if end.startswith(b"{"):
        path.write_bytes(end)
        ResultFile(path, warnings.append).close()
        assert path.read_bytes() == b"" and len(warnings) == 2
