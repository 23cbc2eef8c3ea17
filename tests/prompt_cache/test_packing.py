"""Blocks of the prompt cache whose keys and values are packed: smaller, and the same bits, whoever reads them."""

import pytest
import torch

from offload.kernels.native import KernelUnavailable
from offload.prompt_cache import block as block_files
from offload.prompt_cache.block import pack, read_block, write_block
from offload.prompt_cache.fingerprint import TOKENS
from offload.prompt_cache.folder import Header, UnusableBlock
from tests.support.offloading import native_kernel

IDS = list(range(TOKENS))
HEADER = Header("key", "", "", "m", "", 1.0, 1.0)


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


def same_bits(ours, theirs):
    return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("layout", ["blocks", "plain"])
@pytest.mark.parametrize("reads", ["native", "torch"])
@pytest.mark.parametrize("wild", [0, 1])
def test_what_was_packed_comes_back(tmp_path, monkeypatch, kernel, layout, reads, wild):
    kv = block(layout, wild)
    write_block(tmp_path / "packed", HEADER, IDS, tensors := pack(kv, kernel))
    assert (len(tensors["kv"]), len(tensors["packed"])) == (wild, 6 - wild)
    write_block(tmp_path / "plain", HEADER, IDS, kv)  # as files were before
    sizes = [(tmp_path / name).stat().st_size for name in ("packed", "plain")]
    assert sizes[0] < (0.8 if not wild else 0.85) * sizes[1]
    if reads == "torch":
        monkeypatch.setattr(block_files, "find_kernel", lambda: (_ for _ in ()).throw(KernelUnavailable("none")))
    for name in ("packed", "plain"):
        found, header = read_block(tmp_path / name, "key", IDS)
        assert same_bits(found, kv) and header == HEADER


@pytest.mark.parametrize(
    "kv", [torch.zeros(2, 3, TOKENS, 2, 64), torch.zeros(70).bfloat16(), torch.zeros(2, 3, 8, 512).bfloat16()]
)
def test_what_is_not_packed_stays_as_it_is(tmp_path, kernel, kv):
    """Numbers in fp32, in other shapes, and of heads of 16 dimensions."""
    write_block(tmp_path / "file", HEADER, IDS, pack(kv, kernel))
    found, _ = read_block(tmp_path / "file", "key", IDS)
    assert found.shape == kv.shape and found.dtype == kv.dtype


@pytest.mark.parametrize("place", [-1, -30_000, -100_000])
def test_a_damaged_run_is_noticed(tmp_path, kernel, place):
    write_block(tmp_path / "file", HEADER, IDS, pack(block("blocks"), kernel))
    data = bytearray((tmp_path / "file").read_bytes())
    data[place] ^= 1
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(UnusableBlock, match="checksum"):
        read_block(tmp_path / "file", "key", IDS)
