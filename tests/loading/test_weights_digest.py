"""Digests of weight files: cached while nothing about a file changes, and computed anew when anything does."""

import os
import shutil

import pytest

from offload.loading import weights_digest as module
from offload.loading.weights_digest import weights_digest


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 200)
    os.utime(path, (1e9, 1e9))
    return path


@pytest.fixture
def read(monkeypatch):
    """The files whose content was read. Those just written are noted too."""
    found, plain = [], module._digest
    monkeypatch.setattr(module, "_digest", lambda path: (found.append(path.name), plain(path))[1])
    monkeypatch.setattr(module, "TICK", -1.0)
    return found


def overwrite(path):
    """Change one byte, and nothing else that can be set; later by a tick of the file system's clock."""
    before = path.stat().st_ctime_ns
    data = bytearray(path.read_bytes())
    data[15_000] ^= 255
    with path.open("r+b") as file:
        file.write(data)
    while path.stat().st_ctime_ns == before:
        os.utime(path, (1e9, 1e9))
    os.utime(path, (1e9, 1e9))


def digest(path):
    return weights_digest([path], path.parent / "notes")


def test_a_digest_is_cached_until_the_file_changes(weights, read):
    first = digest(weights)
    assert digest(weights) == first
    assert read == ["weights"]
    overwrite(weights)
    assert digest(weights) != first
    overwrite(weights)
    assert digest(weights) == first
    assert len(read) == 3


@pytest.mark.parametrize("how", [os.rename, shutil.copy, os.link])
def test_the_same_content_has_the_same_digest_wherever_it_is(weights, read, how):
    first, other = digest(weights), weights.with_name("other")
    how(weights, other)
    assert digest(other) == first == digest(other)
    assert len(read) == 2


@pytest.mark.parametrize("nonsense", [b"", b"[]", b"{", b'{"a": 3}', b'{"a": [1]}', b"\xff", b"[" * 100_000])
def test_damaged_notes_are_ignored(weights, read, nonsense):
    first = digest(weights)
    (weights.parent / "notes").write_bytes(nonsense)
    assert digest(weights) == first


def test_a_file_that_was_just_written_is_not_noted(weights, monkeypatch):
    """What comes in the same tick of the file system's clock leaves no trace in its times."""
    monkeypatch.setattr(module, "TICK", 3600.0)
    digest(weights)
    assert not (weights.parent / "notes").exists()
