"""Every store, and the keys, values and queries of the contract tests."""

import tempfile
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch

from offload.architecture.config import ModelShape
from offload.architecture.hf_config import shape_from_config
from offload.architecture.kv_formats import WINDOW
from offload.architecture.rope import Rope, rotate
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.structs import BLOCK
from offload.kernels.ops import TorchOperations
from offload.memory.factory import TieredStoreFactory
from offload.memory.factory import new_store as make_store
from offload.memory.paged_store import PagedStore, PagePool
from offload.memory.store import Store
from offload.settings.kv_formats import BF16
from tests.support.models import make_hf_model
from tests.support.offloading import (
    CPU,
    SHAPE,
    PoisonedDisk,
    make_link,
    native_kernel,
    random_delays,
    settings,
    staged_link,
)

CAPACITY, PAGE, CHUNK = 320, 32, 16  # tokens
PLACEMENTS = [("stream", 0), ("host", 0), ("hybrid", 1), ("stream", 3)]
TIERED = [f"{kind} {mode} {resident} resident" for kind in ("tiered", "native tiered") for mode, resident in PLACEMENTS]
ON_DISK = ["tiered disk 0 resident", "native tiered disk 1 resident", "tiered staged 0 resident"]
STORES = ["plain", "blocks", *TIERED, *ON_DISK]
SOME_STORES = ["plain", "blocks", "tiered hybrid 1 resident", "native tiered hybrid 1 resident"]  # one of each class
QUANTIZED = ["native q8", "native q8 tiered hybrid 1 resident", "native q8 tiered disk 0 resident"]
PACKED = "native packed"  # of bf16 alone
PACKED_TIERS = [
    f"{PACKED} tiered {each}"
    for each in ("stream 0 resident", "hybrid 1 resident", "planes 1 resident", "disk 0 resident")
]
ON_GPU = ["q8", "q8 tiered stream 1 resident", "q8 tiered hybrid 0 resident"]  # quantised, by Triton's kernels
PACKED_ON_GPU = "packed"  # of bf16 alone
ERRORS = {"q8": 0.06}  # of quantised keys and values, and of attention to them


@cache
def tiny_shape() -> ModelShape:
    return shape_from_config(make_hf_model("llama", **SHAPE).config.to_dict(), {})


def quantization(name: str) -> str:
    """Return the format of a store's keys and values, by its name."""
    return next((kind for kind in (*ERRORS, "packed") if kind in name.split()), BF16)


def new_store(name: str, dtype=torch.float32, capacity: int = CAPACITY) -> Store:
    """Make an empty store of one of the names above; some copies over its link are delayed."""
    shape, kv, placement = tiny_shape(), quantization(name), name.partition("tiered ")[2].split()
    kernel = native_kernel() if name.startswith(("blocks", "paged", "native")) else None
    if kernel is None and name.startswith(("blocks", "paged", "native q", PACKED)):
        pytest.skip("there is no native kernel here")
    if name == "paged":
        return PagedStore(PagePool(kernel, shape, 2 * capacity // BLOCK, dtype), capacity)
    if not placement:
        return make_store(kernel, shape, capacity, dtype, CPU, kv)
    mode, resident, page = placement[0], int(placement[1]), PAGE if kv == BF16 else WINDOW
    operations, folder = TorchOperations() if kernel is None else NativeOperations(kernel), Path(tempfile.gettempdir())
    link, more = make_link(before=random_delays(0)), {}
    if mode == "disk":
        mode, link, more = "stream", PoisonedDisk(), {"disk": folder}
    elif mode == "staged":
        mode, link, more = "stream", staged_link(), {"disk": folder, "host_layers": 1}
    tiers = settings(mode, resident, page_tokens=page, **more)
    return TieredStoreFactory(operations, CPU, tiers, link, kv=kv).new_store(shape, capacity, dtype)


@cache
def new_rope(dtype) -> Rope:
    """Return the RoPE of the contract tests, the same object every time."""
    return Rope(tiny_shape(), CAPACITY, dtype, CPU)


@cache
def _projections(layer: int, dtype):
    shape = tiny_shape()
    heads = shape.heads + 2 * shape.kv_heads
    return torch.randn(256, heads, shape.head_dim, generator=torch.Generator().manual_seed(layer)).to(dtype)


def projected(ids: list[int], layer: int, dtype=torch.float32):
    """Return q, k and v of some tokens in a layer, views of one tensor; the same token gets the same values."""
    shape = tiny_shape()
    return _projections(layer, dtype)[torch.tensor(ids)].split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)


def rotated(x, rope: Rope, positions: list[int]):
    """Rotate rows `[tokens, heads, head_dim]` to positions, in fp64."""
    rows = rope.rows(0, max(positions) + 1)
    return rotate(x.double(), tuple(row[torch.tensor(positions)].double() for row in rows))


def definition(ids, start, layer, rope, dtype=torch.float32, visible=None, positions=None):
    """Return attention of the tokens from index `start` on, `[tokens, heads, head_dim]` in fp64.

    Each attends to the `visible` indices (default: all) up to its own, rotated to `positions` (default: the indices).
    """
    visible = range(len(ids)) if visible is None else visible
    positions = visible if positions is None else positions
    return _definition(tuple(ids), start, layer, rope, dtype, tuple(visible), tuple(positions))


@lru_cache(maxsize=4096)  # all stores and caches are compared with the same attention
def _definition(ids, start, layer, rope, dtype, visible, positions):
    q, k, v = projected([ids[index] for index in visible], layer, dtype)
    group = q.shape[1] // k.shape[1]
    q, k = (rotated(x, rope, list(positions)) for x in (q, k))
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    own = torch.tensor(visible) >= start
    future = torch.tensor(visible) > torch.tensor(visible)[own][:, None]
    scores = torch.einsum("thd,khd->htk", q[own], k) / q.shape[-1] ** 0.5
    return torch.einsum("htk,khd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def close(found, expected, error: float = 0.0) -> bool:
    """Compare up to rounding in the dtype of `found`, or a larger error."""
    tolerance = max(4e-2 if found.dtype == torch.bfloat16 else 1e-5, error)
    return found.shape == expected.shape and bool((found.double() - expected).abs().max() <= tolerance)
