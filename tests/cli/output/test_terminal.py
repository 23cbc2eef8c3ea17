"""The terminal: what reaches stdout and stderr, and a status line that never erases the text above it."""

import io
import os
import random

import pytest
from rich.text import Text

from tests.support.terminal import Pty, Screen, stream, written
from triforce_cli.output.progress import ProgressDisplay
from triforce_cli.output.status_line import StatusLine
from triforce_cli.output.terminal import Terminal
from triforce_cli.output.text_layout import TextLayout, visible


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
    ("text", "shown", "column", "exact"),
    [
        ("one two three four", "one two \nthree four", 10, True),  # two of the twelve columns stay free
        ("one two threefour", "one two \nthreefour", 9, True),
        ("one two\nthree", "one two\nthree", 5, True),
        ("one twothree four", "one \ntwothree \nfour", 4, True),
        ("twothreefour five", "twothreefour\nfive", 4, True),  # broken by the terminal itself
        ("日本語日本語", "日本語日本\n語", 2, True),
        ("a\tb", "a       b", 9, True),
        ("a\x1b[2Jb", "a␛[2Jb", 6, True),
        ("e\u0301", "e\u0301", 1, True),
        ("👍\u200d a", "👍\u200d a", 4, False),
        ("👍\u200d\nab", "👍\u200d\nab", 2, True),
    ],
)
def test_text_is_broken_between_words_however_it_comes(text, shown, column, exact):
    for pieces in ([text], list(text)):
        layout = TextLayout(lambda: 12)
        written = "".join(map(layout.feed, pieces)) + layout.rest()
        assert (written, layout.column, layout.exact) == (shown, column, exact)


def test_text_on_a_terminal_alone_is_wrapped():
    tty, out = Pty(20, 6), stream()
    for stdout in (tty.stream(), out):
        terminal = Terminal(stdout, tty.stream(), stream(), {"TERM": "xterm"})
        terminal.wraps = True
        for piece in ("one two thr", "ee four five", " six"):
            terminal.write(piece)
        terminal.end_text()
    assert Screen(20, 6).feed(tty.output()).lines() == ["one two three four", "five six"]
    assert written(out) == "one two three four five six\n"


def test_after_ctrl_c_no_status_and_no_echo_stays():
    tty = Pty(40, 6)
    terminal = Terminal(tty.stream(), tty.stream(), stream(), {"TERM": "xterm", "NO_COLOR": "1"})
    terminal.wraps = True
    display = ProgressDisplay(terminal)
    for text in ("", "one two three"):
        display.write(text)
        display.loading("busy")
        terminal.draw("^C")  # as the terminal echoes it where the cursor is
        display.hide()
        terminal.after_ctrl_c()
    terminal.note("interrupted")
    assert Screen(40, 6).feed(tty.output()).lines() == ["one two three", "interrupted"]


@pytest.mark.parametrize("seed", range(3))
def test_the_status_line_erases_no_text(seed):
    """Random text in random pieces; nothing that terminals measure differently."""
    draw = random.Random(seed)
    columns, rows = draw.choice([(10, 4), (20, 3), (33, 8), (60, 12)])
    letters = "abcdefgh   é日本" + "\t" * draw.choice((0, 1)) + "\n" * draw.choice((0, 1, 3))
    text = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(250)]
    tty = Pty(columns, rows)
    terminal = Terminal(tty.stream(), tty.stream(), stream(), {"TERM": "xterm"})
    terminal.wraps = True
    status, layout = StatusLine(terminal, interval=None), TextLayout(lambda: columns)
    for number, piece in enumerate(text):
        if number % 3 == 0:
            status.show(lambda number=number: Text(f"STATUS {number}"))
        status.write(piece)
    status.clear()
    terminal.end_line()
    output, alone = tty.output(), "".join(map(layout.feed, text)) + layout.rest()
    assert output.count("STATUS") > 5
    assert Screen(columns, rows).feed(output).lines() == Screen(columns, rows).feed(alone).lines()


def test_the_status_line_is_below_the_text_and_one_row_high():
    tty = Pty(20, 6)
    terminal = Terminal(tty.stream(), tty.stream(), stream(), {"TERM": "xterm"})
    terminal.wraps = True
    status = StatusLine(terminal, interval=None)
    status.write("one\ntwo ")
    status.show(lambda: Text("a status that is much too long"))
    status.write("\n")
    status.write("three ")
    assert Screen(20, 6).feed(tty.output()).lines() == ["one", "two", "three", "a status that is…"]


def test_with_stdout_elsewhere_the_status_has_its_own_line():
    tty, out = Pty(20, 6), stream()
    status = StatusLine(Terminal(out, tty.stream(), stream(), {"NO_COLOR": "1"}), interval=None)
    status.show(lambda: Text("STATUS one", style="red"))
    status.write("text\x1b")
    status.clear()
    assert (written(out), tty.output()) == ("text\x1b", "\rSTATUS one\x1b[K\r\x1b[K")
