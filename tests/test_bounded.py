"""Reading endless sources: devices, pipes, files above the limit, and signals while they are read."""

import io
import os
from itertools import repeat
from pathlib import Path

import pytest
import yaml

from offload.errors import PromptError
from offload.hardware import profiles
from offload.system.files import Unbounded, read_bounded
from triforce_cli.input import documents
from triforce_cli.summarize.instructions import load_templates


class Endless(io.RawIOBase):
    """A pipe with an endless writer."""

    def __init__(self, chunk: bytes = b"y\n"):
        self.given, self._chunks = 0, repeat(chunk)

    def readable(self):
        return True

    def readinto(self, buffer):
        assert self.given < 10_000
        chunk = next(self._chunks)[: len(buffer)]
        buffer[: len(chunk)] = chunk
        self.given += len(chunk)
        return len(chunk)


def refused(path) -> PromptError:
    with pytest.raises(PromptError) as caught:
        documents.read(Path(path), None, pytest.fail)
    return caught.value


def test_up_to_the_limit_and_not_beyond(tmp_path, monkeypatch):
    path = tmp_path / "book.txt"
    path.write_bytes(b"0123456789")
    monkeypatch.setattr(documents, "LIMIT", 10)
    assert documents.read(path, None, pytest.fail) == "0123456789"
    monkeypatch.setattr(documents, "LIMIT", 9)
    error = refused(path)
    assert error.message == f"{path} has 10 bytes, more than the 9 that are read"
    assert "head -c 9" in error.hint
    with path.open("rb") as file:
        file.read(4)  # bytes read before do not count
        assert read_bounded(file, 6) == b"456789"


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "book.txt"
    with path.open("wb") as file:
        file.truncate(documents.LIMIT + 1)  # a sparse file
    assert f"{documents.LIMIT:,}" in refused(path).message


def test_an_endless_pipe_is_read_up_to_the_limit(monkeypatch):
    endless = Endless()
    monkeypatch.setattr(documents, "LIMIT", 1000)
    with pytest.raises(PromptError, match="standard input has more than 1,000 bytes") as caught:
        documents.read(documents.STDIN, io.TextIOWrapper(io.BufferedReader(endless, 64)), pytest.fail)
    assert "head -c 1000" in caught.value.hint
    assert endless.given < 1100
    with pytest.raises(Unbounded):
        read_bounded(io.StringIO("日" * 400), 1000)


def test_pipes_with_an_end_are_read_like_files():
    profile = yaml.safe_dump({"name": "mine", "description": "mine", "device": "cpu"})
    for text, read in (
        ("piped", lambda path: documents.read(path, None, pytest.fail) == "piped"),
        ("Read {document}", lambda path: "{document}" in load_templates(path).document.text),
        (profile, lambda path: profiles.load(path).name == "mine"),
    ):
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        assert read(Path(f"/dev/fd/{reading}"))
        os.close(reading)


def test_reads_of_a_pipe_that_does_not_block_wait_for_data():
    """Node makes pipes non-blocking: no data yet is not the end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.write(writing, b"first second")
    os.close(writing)
    with open(reading, "rb") as stream:
        assert read_bounded(stream, 100) == b"first second"
        assert os.get_blocking(reading)
