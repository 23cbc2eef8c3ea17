"""Files of the user's own that are written as a whole."""

import stat

from triforce_cli.output.output_files import write_file


def test_a_file_keeps_its_permissions(tmp_path):
    new, own = tmp_path / "new.txt", tmp_path / "own.txt"
    own.touch(0o600)
    for path in (new, own):
        write_file(path, "text")
        assert path.read_text() == "text"
    (tmp_path / "usual.txt").touch()
    assert new.stat().st_mode == (tmp_path / "usual.txt").stat().st_mode
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
