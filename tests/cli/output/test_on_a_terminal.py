"""`triforce generate` on a terminal: the bar, the status line, colours, and what is left on the screen."""

import os
import re

from tests.support.command import (
    STATISTICS,
    STORY,
    on_a_terminal,
    uncolored,
)
from tests.support.terminal import Screen


def test_a_terminal_shows_the_bar_and_keeps_only_text_and_statistics(endless_model_dir, tmp_path, triforce):
    code, output = on_a_terminal(endless_model_dir, tmp_path, *STORY)
    assert code == 0
    assert "prefill" in output
    assert "decode · " in uncolored(output)
    assert " · auto" in uncolored(output)
    assert "context" in output
    decoding = output.rpartition("\x1b[?25h")[2]  # from where the prefill bar gave the cursor back, and erased itself
    decoding = re.sub(r"^(\n|\r|\x1b\[1A|\x1b\[2K)*", "", decoding)
    lines = Screen(80, 24).feed(uncolored(decoding)).lines()
    shown = "".join(line.rstrip() for line in lines)
    assert "decode · " not in shown
    assert "prefill " not in shown
    assert STATISTICS.search(shown)
    plain = triforce(*STORY, "--model", endless_model_dir).stdout
    letters = [character for character in plain if character.isascii() and character.isalnum()]
    assert len(letters) > 10
    kept = [character for character in shown if character.isascii() and character.isalnum()]
    assert kept[: len(letters)] == letters


def test_no_color_and_dumb_terminals_are_respected(on_a_terminal_here):
    _, output = on_a_terminal_here(*STORY, env={"NO_COLOR": "1"})
    assert "decode · " in uncolored(output)
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", output.replace("\x1b[1m", "").replace("\x1b[2m", ""))
    _, output = on_a_terminal_here(*STORY, env={"TERM": "dumb"})
    assert "\x1b" not in output
    assert STATISTICS.search(output)


def test_no_status_line_under_text_that_comes_back_through_a_pipe(on_a_terminal_here):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe, os.fdopen(reading, "rb"):
        _, output = on_a_terminal_here(*STORY, stdout=pipe)
    assert "decode · " not in output
    assert STATISTICS.search(output)
