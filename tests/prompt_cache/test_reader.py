"""Blocks that are read ahead: their order, their memory, and errors in between."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from offload.prompt_cache.block import Buffer, read_block, write_block
from offload.prompt_cache.chain import BlockReader
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import Header, UnusableBlock

COUNT = 12


def header(index):
    return Header(f"key {index}", "", "", "m", "", 1.0, 1.0)


@pytest.fixture
def prompt(tmp_path):
    """Blocks of KV that have their own number everywhere, and sizes of their own."""

    def read(index, buffer=None):
        return read_block(tmp_path / str(index), f"key {index}", [index] * TOKENS, buffer=buffer)

    for index in range(COUNT):
        kv = torch.full((2, 1, 3 + index % 3, 64), float(index))
        write_block(tmp_path / str(index), header(index), [index] * TOKENS, kv)
    return SimpleNamespace(read=read, folder=tmp_path)


def test_blocks_come_in_order_and_stay_valid_until_the_next(prompt):
    with BlockReader(prompt, range(2, COUNT)) as reader:
        for index in range(2, COUNT):
            kv, found = reader.take()
            time.sleep(0.005)  # the threads read ahead
            assert found == header(index)
            assert kv.shape == (2, 1, 3 + index % 3, 64) and bool((kv == index).all())


def test_an_error_is_that_of_its_block_alone(prompt):
    (prompt.folder / "3").unlink()
    (prompt.folder / "5").write_bytes(b"no block")
    with BlockReader(prompt, range(COUNT)) as reader:
        for index in range(COUNT):
            if index in (3, 5):
                with pytest.raises(FileNotFoundError if index == 3 else UnusableBlock):
                    reader.take()
            else:
                assert reader.take()[1] == header(index)


def test_a_block_of_the_key_with_other_tokens_is_refused(prompt):
    """Keys are hashes of the tokens: should two collide, or a block be saved under the key of another one."""
    write_block(prompt.folder / "4", header(4), [5] * TOKENS, torch.zeros(2, 1, 3, 64))
    with pytest.raises(UnusableBlock, match="different tokens"):
        prompt.read(4)


def test_closed_early_its_threads_end(prompt):
    with BlockReader(prompt, range(COUNT)) as reader:
        reader.take()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("triforce-prompt-reader")]


def test_what_was_verified_does_not_change_with_the_file(prompt):
    kv, _ = prompt.read(1, Buffer())
    with open(prompt.folder / "1", "r+b") as file:
        file.truncate(0)  # a mapped file would end the process here
    assert bool((kv == 1).all())


@pytest.mark.parametrize("change", ["dtype", "shape", "offsets", "length", "kind"])
def test_a_header_that_lies_about_the_data_is_damage(prompt, change):
    path = prompt.folder / "1"
    data = path.read_bytes()
    old, new = {
        "dtype": (b'"F32"', b'"F64"'),
        "shape": (b"[2,1,4,64]", b"[2,1,9,64]"),
        "offsets": (b'"data_offsets":[', b'"data_offsets":9'),
        "length": (data[:8], b"\xff" * 8),
        "kind": (b'"kv"', b'"kw"'),
    }[change]
    assert old in data
    path.write_bytes(data.replace(old, new))
    with pytest.raises(UnusableBlock):
        prompt.read(1)
