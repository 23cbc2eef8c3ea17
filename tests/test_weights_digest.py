"""Digests of weight files: cached while nothing about a file changes, and computed anew when anything does."""

import json
import os
import shutil
import struct

import pytest
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from offload.loading import weights_digest as module
from offload.loading.hub.download import open_checkpoint
from offload.loading.weights_digest import are_unchanged, file_mark, file_state, weights_digest
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.waiting import until

TENSORS = ((8, 40_000), (40_008, 64))  # of the file of the tests


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 200)
    os.utime(path, (1e9, 1e9))
    return path


@pytest.fixture
def hashed(monkeypatch):
    """The files whose whole content was hashed. Those just written are noted too."""
    found, plain = [], module._digest
    monkeypatch.setattr(module, "_digest", lambda path: (found.append(path.name), plain(path))[1])
    monkeypatch.setattr(module, "TICK", -1.0)
    return found


def overwrite(path, position):
    """Change one byte, and nothing else that can be set; later by a tick of the file system's clock."""
    before = path.stat().st_ctime_ns
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 255]))
    os.utime(path, (1e9, 1e9))
    until(lambda: path.stat().st_ctime_ns != before or os.utime(path, (1e9, 1e9)))


def digest(path, notes=None):
    return weights_digest({path: TENSORS}, notes or path.parent / "notes")


def test_a_digest_is_cached_until_the_file_changes(weights, hashed):
    first = digest(weights)
    assert digest(weights) == first
    assert hashed == ["weights"]
    overwrite(weights, 15_000)  # between two samples
    assert digest(weights) != first
    overwrite(weights, 15_000)
    assert digest(weights) == first
    assert len(hashed) == 3


@pytest.mark.parametrize("how", ["moved", "copied", "touched", "hard link"])
def test_the_same_content_has_the_same_digest_wherever_it_is(weights, hashed, how):
    first, other = digest(weights), weights.with_name("other")
    if how == "moved":
        weights.rename(other)
    elif how == "copied":
        shutil.copy(weights, other)
    elif how == "hard link":
        other.hardlink_to(weights)
    else:
        (other := weights).touch()
    assert digest(other) == first
    assert len(hashed) == 2
    assert digest(other) == first
    assert len(hashed) == 2


@pytest.mark.parametrize("position", [0, 8, 20_000, 40_007, 40_008, 40_050, 40_071])
def test_samples_tell_changes_where_the_file_system_has_no_change_times(weights, hashed, monkeypatch, position):
    """In the header, at the ends and in the middle of tensors, and anywhere in small ones."""
    monkeypatch.setattr(module, "file_state", lambda path: (path.stat().st_size, 0, 0, 0))
    first = digest(weights)
    overwrite(weights, position)
    assert digest(weights) != first


def test_files_of_unknown_layout_are_sampled_evenly(weights, monkeypatch):
    weights.write_bytes(bytes(module._MANY * 3 * module._SAMPLE))
    monkeypatch.setattr(module, "file_state", lambda path: (path.stat().st_size, 0, 0, 0))
    first = file_mark(weights)
    for position in (0, 3 * module._SAMPLE * 700):
        overwrite(weights, position)
        assert file_mark(weights) != first
        overwrite(weights, position)
    assert file_mark(weights) == first


def test_damaged_notes_are_ignored(weights, hashed):
    first, notes = digest(weights), weights.parent / "notes"
    old = {str(weights): [weights.stat().st_size, weights.stat().st_mtime_ns, "of an earlier version"]}
    for nonsense in (b"", b"[]", b"{", b'{"a": 3}', b"\xff", b"[" * 100_000, json.dumps(old).encode()):
        notes.write_bytes(nonsense)
        assert digest(weights) == first


def test_a_file_that_was_just_written_is_not_noted(weights, hashed, monkeypatch):
    """What comes in the same tick of the file system's clock leaves no trace in its times."""
    monkeypatch.setattr(module, "TICK", 3600.0)
    digest(weights)
    assert not (weights.parent / "notes").exists()


def test_a_file_that_changes_while_it_is_hashed_is_not_noted(weights, hashed, monkeypatch):
    first, plain = digest(weights), module._digest
    overwrite(weights, 100)
    monkeypatch.setattr(module, "_digest", lambda path: (plain(path), overwrite(path, 200))[0])
    digest(weights)
    monkeypatch.setattr(module, "_digest", plain)
    overwrite(weights, 200)
    overwrite(weights, 100)
    assert digest(weights) == first


def test_files_that_changed_or_vanished(weights):
    states = {weights: file_state(weights)}
    assert are_unchanged(states)
    weights.unlink()
    assert not are_unchanged(states)


def test_more_tensors_than_a_thousand_are_sampled_once_each(weights):
    small = [(8 + 4 * index, 4) for index in range(module._MANY + 1)]
    assert len(list(module._pieces(51_200, small))) == module._MANY + 2


@pytest.mark.parametrize("kind", ["sharded", "gguf"])
def test_checkpoints_know_where_their_tensors_are(tmp_path, kind):
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, make_hf_model("llama"), GGMLQuantizationType.Q8_0, tokenizer=make_tokenizer())
        ((file, extents),) = open_checkpoint(path).extents().items()
        assert file == path
        assert sum(length for _, length in extents) == sum(tensor.n_bytes for tensor in tensors_of(path))
        return
    make_hf_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    found = open_checkpoint(tmp_path).extents()
    assert list(found) == sorted(tmp_path.glob("*.safetensors"))
    assert len(found) > 1
    for path, extents in found.items():
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        assert min(extents)[0] == start
        stored = sorted(tensor.view(-1).numpy().tobytes() for tensor in load_file(path).values())
        assert sorted(data[first : first + length] for first, length in extents) == stored


def tensors_of(path):
    from gguf import GGUFReader

    return GGUFReader(path).tensors
