"""The CUDA link, pinned memory, and tiers on a GPU. Some tests need no GPU."""

import pytest
import torch

from offload.architecture.rope import rotate
from offload.kernels.native.layout import write_blocks
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.factory import TieredStoreFactory
from offload.memory.page import BlockPageFormat
from tests.support.models import id_tensor, make_hf_model
from tests.support.offloading import CAPACITY, PAGE, SHAPE, native_kernel, settings

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = torch.device("cuda", 0)
MODES = [("stream", 0), ("host", 0), ("hybrid", 0), ("hybrid", 1), ("stream", 2), ("stream", 3)]
LATE = 200_000_000  # cycles that the device sleeps, about 0.1 s


def both_appended(shape, dtype, device):
    """Return a page filled on the CPU by the kernel and one filled on `device` by torch, with rotated queries."""
    kernel = native_kernel()
    if kernel is None:
        pytest.skip("there is no native kernel here")
    draw = torch.Generator().manual_seed(0)
    format = BlockPageFormat(shape, PAGE, kernel)
    q = torch.randn(40, shape.heads, shape.head_dim, generator=draw).to(dtype)
    k, v = (torch.randn(40, shape.kv_heads, shape.head_dim, generator=draw).to(dtype) for _ in range(2))
    angles = torch.rand(40, 1, shape.head_dim // 2, generator=draw).repeat(1, 1, 2)
    rows = (angles.cos().to(dtype), angles.sin().to(dtype))
    page, rotated = torch.zeros(format.numbers, dtype=dtype), torch.empty_like(q)
    format.append(page, 3, q, k, v, rows, rotated)
    there = torch.zeros(format.numbers, dtype=dtype, device=device)
    if device.type == "cpu":  # what the format does on a GPU
        positions = torch.arange(3, 43)
        write_blocks(format.parts(there), shape.head_dim, positions, rotate(k, rows).transpose(0, 1), v.transpose(0, 1))
        return format, page, rotated, there, rotate(q, rows)
    far = torch.empty_like(q, device=device)
    format.append(there, 3, *(x.to(device) for x in (q, k, v)), tuple(row.to(device) for row in rows), far)
    return format, page, rotated, there, far


def close(found, expected, dtype):
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.float().cpu(), expected.float(), **tolerance)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    make_hf_model("llama", **SHAPE).save_pretrained(folder)
    return FolderCheckpoint(folder).shape


DEVICES = [torch.device("cpu"), pytest.param(GPU, marks=[pytest.mark.cuda, needs_gpu])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_page_written_on_any_device_is_the_kernel_s(shape, dtype, device):
    format, page, rotated, there, far = both_appended(shape, dtype, device)
    close(there, page, dtype)
    close(far, rotated, dtype)
    plain = [x.to(device) for x in format.read(page)]
    for found, expected in zip(format.read(page.to(device)), plain, strict=True):
        assert torch.equal(found, expected)  # copying changes no bit


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda-tiers")
    make_hf_model("llama", **SHAPE).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), request.param, GPU, lambda done, total: None, TorchOperations())


def tiered_gpu_cache(model, mode, resident):
    spread = TieredStoreFactory(model.operations, model.device, settings(mode, resident), None)
    return model.new_cache(CAPACITY, store=spread.new_store(model.shape, CAPACITY, model.dtype))


def same(model, found, expected):
    """Compare up to rounding, which differs with pages and on the host."""
    return (found - expected).abs().max() <= (0.03 if model.dtype == torch.bfloat16 else 1e-4) * expected.abs().max()


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize(("mode", "resident"), MODES)
@pytest.mark.parametrize("by_layers", [False, True])
def test_any_placement_gives_the_full_cache_s_rows_on_a_gpu(model, mode, resident, by_layers):
    prompt = id_tensor(CAPACITY).to(GPU)
    expected = model.forward(prompt, model.new_cache(CAPACITY))
    cache = tiered_gpu_cache(model, mode, resident)
    model.forward(prompt[:90], cache)
    if by_layers:
        list(model.forward_by_layers(prompt[90:500], cache, 50))
    else:
        for part in prompt[90:500].split(50):
            model.forward(part, cache)
    model.forward(prompt[500:503], cache)
    cache.truncate(501)  # rolled back and run again
    found = torch.cat([model.forward(part, cache) for part in prompt[501:].split(40)])
    assert same(model, found, expected[501:])


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize(("mode", "resident"), [("stream", 0), ("stream", 2), ("stream", 3)])
def test_a_pass_on_a_gpu_waits_for_nothing(model, mode, resident):
    cache = tiered_gpu_cache(model, mode, resident)
    passes = [part.to(GPU) for part in (*id_tensor(200).split(100), *id_tensor(24, 1).split(8))]
    for part in passes[:3]:  # loads kernels
        model.forward(part, cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in passes[3:]:
            model.forward(part, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
