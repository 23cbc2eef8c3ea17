"""The prompt from files, stdin and argument, and the bytes that become it."""

import io
import os
from pathlib import Path

import pytest

from offload.errors import PromptError
from tests.support.paths import DATA
from tests.support.terminal import Pty
from triforce_cli.input.documents import read_prompt

WESTERN = DATA / "frankenstein-cp1252.txt"
NO_STDIN = None


def no_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def read(argument=None, files=(), stdin=NO_STDIN, warn=no_warning) -> str:
    return read_prompt(argument, list(files), stdin, warn).text


def refused(**request) -> PromptError:
    with pytest.raises(PromptError) as caught:
        read(**{"warn": lambda text: None} | request)
    assert caught.value.message and caught.value.hint
    return caught.value


def fed(data: bytes) -> io.TextIOWrapper:
    """Real standard input: the reading end of a pipe."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return open(reading, encoding="utf-8")


@pytest.fixture
def book(tmp_path):
    def write(data: bytes, name: str = "book.txt") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def test_each_source_alone_is_unchanged(book):
    assert read("  hello\\n ") == "  hello\\n "
    assert read(files=[book(b"\n a \n\n")]) == "\n a \n\n"
    assert read(stdin=fed(b"piped\n")) == "piped\n"
    assert read(files=[Path("-")], stdin=fed(b"piped\n")) == "piped\n"


def test_order_and_joints(book):
    first, second = book(b"\nfirst\n", "1"), book(b"\n\nsecond\n\n\n", "2")
    joined = read("question\n", [first, second], fed(b"  piped"))
    assert joined == "\nfirst\n\nsecond\n\n  piped\n\nquestion\n"
    assert read("q", [first, Path("-"), second], fed(b"piped")) == "\nfirst\n\npiped\n\nsecond\n\nq"


def test_stdin_is_read_only_from_a_pipe_or_file(book):
    tty = Pty()
    with open(os.devnull) as nothing:
        assert read("hello", stdin=nothing) == "hello"
        assert refused(stdin=nothing).message == "no prompt"
    assert read("hello", stdin=tty.stream("r")) == "hello"
    tty.output()
    with open(book(b"redirected")) as file:
        assert read("hello", stdin=file) == "redirected\n\nhello"


def test_blank_parts(book):
    assert read("hello", stdin=fed(b"")) == "hello"
    warnings = []
    assert read("hello", [book(b" \n")], warn=warnings.append) == "hello"
    assert len(warnings) == 1 and "book.txt is empty" in warnings[0]
    for request in ({"argument": " \n"}, {"files": [book(b"")]}, {"stdin": fed(b"\n")}):
        assert "empty" in refused(**request).message


def test_the_argument_may_be_stdin(book):
    assert read("-", stdin=fed(b"piped\n")) == "piped\n"
    assert read("-", [book(b"file\n")], fed(b"piped")) == "file\n\npiped"
    assert read("- ", stdin=NO_STDIN) == "- "
    assert "closed" in refused(argument="-").message
    with open(os.devnull) as nothing:
        assert "empty (standard input)" in refused(argument="-", stdin=nothing).message


def test_minus_as_the_argument_reads_from_the_terminal():
    master, slave = os.openpty()
    os.write(master, b"typed\n\x04")
    warnings = []
    with open(slave, encoding="utf-8") as stdin:
        assert read("-", stdin=stdin, warn=warnings.append) == "typed\n"
    os.close(master)
    assert warnings == ["reading from the terminal; end it with Ctrl-D"]


def test_stdin_only_once():
    assert "twice" in refused(argument="-", files=[Path("-")], stdin=fed(b"x")).message
    assert "twice" in refused(files=[Path("-"), Path("-")], stdin=fed(b"x")).message
    assert "closed" in refused(files=[Path("-")], stdin=None).message


def test_western_book_is_guessed_with_one_warning():
    warnings = []
    data = WESTERN.read_bytes()
    assert read(files=[WESTERN], warn=warnings.append) == data.decode("cp1252")
    assert len(warnings) == 1 and "cp1252" in warnings[0] and WESTERN.name in warnings[0]


def test_missing_file_with_a_suggestion(book, tmp_path):
    book(b"x", "frankenstein.txt")
    error = refused(files=[tmp_path / "frankenstien.txt"])
    assert "frankenstien.txt" in error.message
    assert f"did you mean {tmp_path / 'frankenstein.txt'}?" in error.hint
    assert "did you mean" not in refused(files=[tmp_path / "zzz"]).hint
    (tmp_path / "link.txt").symlink_to("gone.txt")
    assert refused(files=[tmp_path / "link.txt"]).message.endswith("link.txt is a link to gone.txt, which is not there")
    assert "no folder" in refused(files=[tmp_path / "nowhere" / "book.txt"]).hint


def test_folder_and_unreadable_file(book, tmp_path):
    assert "is a folder" in refused(files=[tmp_path]).message
    assert "cannot be read" in refused(files=[tmp_path / ("x" * 300)]).message
    locked = book(b"x")
    locked.chmod(0)
    if not os.access(locked, os.R_OK):  # root may read anything
        assert "permission denied" in refused(files=[locked]).message


def test_argument_of_other_bytes():
    warnings = []
    assert read(os.fsdecode("un café crème".encode("cp1252")), warn=warnings.append) == "un café crème"
    assert "argument" in warnings[0]
    assert "not valid Unicode" in refused(argument="\ud800").message
