"""The terminal: what reaches stdout and stderr, and a status line that never erases the text above it."""

import io
import os
import random

import pytest
from rich.text import Text

from tests.support.terminal import Pty, Screen, stream, written
from triforce_cli.output.cursor import Cursor, visible
from triforce_cli.output.status_line import StatusLine
from triforce_cli.output.terminal import Terminal


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_visible_keeps_newline_tab_and_text():
    assert visible("a\nb\tc é 日本 👍") == "a\nb\tc é 日本 👍"
    hidden = [*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), *map(chr, range(0x202A, 0x202F))]
    for char in hidden + [chr(code) for code in range(0x2066, 0x206A)]:
        assert (visible(char) == char) == (char in "\n\t")


def test_messages_are_single_lines_that_do_not_continue_the_text():
    out, err = stream(), stream()
    terminal = Terminal(out, err, stream(), {})
    terminal.note("a note")
    terminal.warn("odd\nname \x1b[31m")
    terminal.error("it\n  broke\n", "do\nthis")
    terminal.error("no hint")
    lines = ["a note", "warning: odd name ␛[31m", "error: it broke", "hint: do", "hint: this", "error: no hint"]
    assert (written(out), written(err).splitlines()) == ("", lines)
    tty = Pty()
    terminal = Terminal(tty.stream(), tty.stream(), stream(), {"NO_COLOR": "1"})
    terminal.write("text")
    terminal.error("stopped")
    assert tty.output() == "text\nerror: stopped\n"


@pytest.mark.parametrize(
    ("environ", "choice", "on_terminal", "colored"),
    [
        ({}, "auto", True, True),
        ({}, "auto", False, False),
        ({"NO_COLOR": "1"}, "auto", True, False),
        ({"NO_COLOR": ""}, "auto", True, True),
        ({"FORCE_COLOR": "1"}, "auto", False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, "auto", False, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, "auto", True, False),
        ({"NO_COLOR": "1"}, "always", False, True),
        ({"FORCE_COLOR": "1"}, "never", True, False),
    ],
)
def test_color(environ, choice, on_terminal, colored):
    tty = Pty()
    terminal = Terminal(stream(), tty.stream() if on_terminal else stream(), stream(), environ, choice)
    assert terminal.color == colored
    assert terminal.shows_progress == (on_terminal and environ.get("TERM") != "dumb")
    terminal.error("x")
    assert ("\x1b[" in tty.output()) == (colored and on_terminal)


def test_a_closed_stdout_raises_and_a_closed_stderr_does_not():
    reading, writing = os.pipe()
    os.close(reading)
    out = open(writing, "w")  # noqa: SIM115 - it is to be broken
    terminal = Terminal(out, stream(), stream(), {})
    for act in (lambda: terminal.write("text"), out.close):
        with pytest.raises(BrokenPipeError):
            act()
    err = io.StringIO()
    err.close()
    Terminal(stream(), err, stream(), {}).error("nobody", "hears")


@pytest.mark.parametrize(
    ("text", "column", "row", "exact"),
    [
        ("abcdefghij", 10, 0, True),  # pending wrap: nothing has moved yet
        ("abcdefghijk", 1, 1, True),
        ("a日本語日本", 2, 1, True),
        ("a\tb", 9, 0, True),
        ("12345678\t", 9, 0, True),  # a tab stops at the last column
        ("abcdefghij\t", 10, 0, False),
        ("e\u0301", 1, 0, True),
        ("👍\u200d", 2, 0, False),
        ("👍\u200d\nab", 2, 1, True),
    ],
)
def test_cursor(text, column, row, exact):
    cursor = Cursor(10)
    cursor.feed(text)
    assert (cursor.column, cursor.row, cursor.exact) == (column, row, exact)
    cursor.resize(8)
    assert not cursor.settled
    cursor.feed("\n")
    assert cursor.settled


@pytest.mark.parametrize("seed", range(3))
def test_the_status_line_erases_no_text(seed):
    """Random text in random pieces; nothing that terminals measure differently."""
    draw = random.Random(seed)
    columns, rows = draw.choice([(10, 4), (20, 3), (33, 8), (60, 12)])
    letters = "abcdefgh   é日本" + "\t" * draw.choice((0, 1)) + "\n" * draw.choice((0, 1, 3))
    text = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(250)]
    tty, clock = Pty(columns, rows), Clock()
    status = StatusLine(Terminal(tty.stream(), tty.stream(), stream(), {"TERM": "xterm"}), clock)
    for number, piece in enumerate(text):
        clock.now += 0.07
        status.refresh(lambda number=number: Text(f"STATUS {number}"))
        status.write(piece)
    status.clear()
    output = tty.output()
    assert output.count("STATUS") > 5
    assert Screen(columns, rows).feed(output).lines() == Screen(columns, rows).feed("".join(text)).lines()


def test_the_status_line_is_below_the_text_and_one_row_high():
    tty, clock = Pty(20, 6), Clock()
    status = StatusLine(Terminal(tty.stream(), tty.stream(), stream(), {"TERM": "xterm"}), clock)
    status.write("one\ntwo")
    status.refresh(lambda: Text("a status that is much too long"))
    status.write(" three")
    assert Screen(20, 6).feed(tty.output()).lines() == ["one", "two three", "a status that is m…"]


def test_with_stdout_elsewhere_the_status_has_its_own_line():
    tty, out = Pty(20, 6), stream()
    status = StatusLine(Terminal(out, tty.stream(), stream(), {"NO_COLOR": "1"}), Clock())
    status.refresh(lambda: Text("STATUS one", style="red"))
    status.write("text\x1b")
    status.clear()
    assert (written(out), tty.output()) == ("text\x1b", "\r\x1b[KSTATUS one\r\x1b[K")
