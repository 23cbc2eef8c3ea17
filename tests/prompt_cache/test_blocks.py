"""Block files: packed and plain, read ahead in order, and damage in their headers."""

import threading
from types import SimpleNamespace

import pytest
import torch

from offload.prompt_cache.block import Buffer, read_block, write_block
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import Header, UnusableBlock
from offload.prompt_cache.packing import pack
from offload.prompt_cache.prompt import BlockReader
from tests.support.offloading import native_kernel

COUNT = 12
HEADER = Header("key", "", "", "m", "", 1.0)


@pytest.fixture
def kernel():
    return native_kernel() or pytest.skip("there is no native kernel here")


def block(layout, wild=1):
    """Return keys and values of 2 layers and 3 heads; the exponents of `wild` heads do not fit 4 bits."""
    size = (2, 3, 8, 32 * 64) if layout == "blocks" else (2, 3, TOKENS, 2, 64)
    kv = torch.randn(size, generator=torch.Generator().manual_seed(0))
    some = kv.flatten(0, 1)[2 : 2 + wild]
    some *= torch.randint(-40, 1, some.shape, generator=torch.Generator().manual_seed(1)).exp2()
    return kv.bfloat16()


@pytest.mark.parametrize("layout", ["blocks", "plain"])
@pytest.mark.parametrize("wild", [0, 1])
def test_what_was_packed_comes_back_bit_for_bit(tmp_path, kernel, layout, wild):
    kv = block(layout, wild)
    sizes = [
        write_block(tmp_path / "packed", HEADER, pack(kv, kernel)),
        write_block(tmp_path / "plain", HEADER, pack(kv, None)),
    ]
    assert sizes[0] < (0.85 if wild else 0.8) * sizes[1]
    for name in ("packed", "plain"):
        found, header = read_block(tmp_path / name, "key")
        assert torch.equal(found.view(torch.int16), kv.view(torch.int16)) and header == HEADER


@pytest.mark.parametrize(
    "kv", [torch.zeros(2, 3, TOKENS, 2, 64), torch.zeros(70).bfloat16(), torch.zeros(2, 3, 8, 512).bfloat16()]
)
def test_what_is_not_packed_stays_as_it_is(tmp_path, kernel, kv):
    """Numbers in fp32, in other shapes, and of heads of 16 dimensions."""
    write_block(tmp_path / "file", HEADER, pack(kv, kernel))
    found, _ = read_block(tmp_path / "file", "key")
    assert found.shape == kv.shape and found.dtype == kv.dtype


def header(index):
    return Header(f"key {index}", "", "", "m", "", 1.0)


@pytest.fixture
def prompt(tmp_path):
    """Blocks of KV that have their own number everywhere, and sizes of their own."""

    def read(index, buffer=None):
        return read_block(tmp_path / str(index), f"key {index}", buffer=buffer)[0]

    for index in range(COUNT):
        kv = torch.full((2, 1, 3 + index % 3, 64), float(index))
        write_block(tmp_path / str(index), header(index), {"kv": kv})
    return SimpleNamespace(read=read, folder=tmp_path)


def test_blocks_come_in_order_valid_until_the_next_and_an_error_is_that_of_its_block_alone(prompt):
    (prompt.folder / "3").unlink()
    (prompt.folder / "5").write_bytes(b"no block")
    with BlockReader(prompt, range(COUNT)) as reader:
        for index in range(COUNT):
            if index in (3, 5):
                with pytest.raises(FileNotFoundError if index == 3 else UnusableBlock):
                    reader.take()
                continue
            kv = reader.take()
            assert kv.shape == (2, 1, 3 + index % 3, 64) and bool((kv == index).all())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("triforce-prompt-reader")]


def test_what_was_verified_does_not_change_with_the_file(prompt):
    kv = prompt.read(1, Buffer())
    with open(prompt.folder / "1", "r+b") as file:
        file.truncate(0)  # a mapped file would end the process here
    assert bool((kv == 1).all())


@pytest.mark.parametrize("change", ["dtype", "shape", "offsets", "length", "kind", "data"])
def test_a_header_that_does_not_match_the_data_is_damage(prompt, change):
    path = prompt.folder / "1"
    data = path.read_bytes()
    old, new = {
        "dtype": (b'"F32"', b'"F64"'),
        "shape": (b"[2,1,4,64]", b"[2,1,9,64]"),
        "offsets": (b'"data_offsets":[', b'"data_offsets":9'),
        "length": (data[:8], b"\xff" * 8),
        "kind": (b'"kv"', b'"kw"'),
        "data": (data[-4:], b"\x00\x00\x00\x01"),
    }[change]
    assert old in data
    path.write_bytes(data.replace(old, new))
    with pytest.raises(UnusableBlock):
        prompt.read(1)
