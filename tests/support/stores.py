"""Every store, and the keys, values and queries that contracts put into them."""

from functools import cache

import pytest
import torch

from offload.architecture.config import ModelShape, shape_from_config
from offload.architecture.rope import Rope, rotate
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.kv_cache.block_store import BlockStore
from offload.kv_cache.store import PlainStore, Store
from offload.offloading import TieredStoreFactory
from tests.support.models import make_hf_model
from tests.support.offloading import CPU, SHAPE, dawdler, make_link, native_kernel, settings

CAPACITY, PAGE, CHUNK = 320, 32, 16  # tokens
PLACEMENTS = [("stream", 0), ("host", 0), ("hybrid", 0), ("hybrid", 1), ("stream", 2), ("stream", 3)]
TIERED = [f"{kind} {mode} {resident} resident" for kind in ("tiered", "native tiered") for mode, resident in PLACEMENTS]
STORES = ["plain", "blocks", *TIERED]
SOME_STORES = ["plain", "blocks", "tiered hybrid 1 resident", "native tiered hybrid 1 resident"]  # one of each class


@cache
def tiny_shape() -> ModelShape:
    return shape_from_config(make_hf_model("llama", **SHAPE).config.to_dict(), {})


def new_store(name: str, dtype=torch.float32, capacity: int = CAPACITY) -> Store:
    """An empty store of one of the kinds in `STORES`; what is copied over its link is late now and then."""
    if name == "plain":
        return PlainStore(tiny_shape(), capacity, dtype, CPU)
    kernel = native_kernel() if name.startswith(("blocks", "native")) else None
    if kernel is None and not name.startswith("tiered"):
        pytest.skip("there is no native kernel here")
    if name == "blocks":
        return BlockStore(kernel, tiny_shape(), capacity, dtype)
    mode, resident = name.removeprefix("native ").split()[1:3]
    operations = TorchOperations() if kernel is None else NativeOperations(kernel)
    spread = TieredStoreFactory(
        operations, CPU, settings(mode, int(resident), page_tokens=PAGE), make_link(before=dawdler(0))
    )
    return spread.new_store(tiny_shape(), capacity, dtype)


def projected(ids: list[int], layer: int, dtype=torch.float32):
    """q, k and v of some tokens in a layer, the same for the same token, side by side as the model computes them."""
    shape = tiny_shape()
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    table = torch.randn(256, sum(heads), shape.head_dim, generator=torch.Generator().manual_seed(layer))
    return table[torch.tensor(ids)].to(dtype).split(heads, dim=1)


def rotated(x, rope: Rope, positions: list[int]):
    """Rows `[tokens, heads, head_dim]` at these positions, in fp64."""
    rows = rope.rows(0, max(positions) + 1)
    return rotate(x.double(), tuple(row[torch.tensor(positions)].double() for row in rows))


def definition(ids, start, layer, rope, dtype=torch.float32, visible=None, positions=None):
    """Attention of the tokens from place `start` on, `[tokens, heads, head_dim]` in fp64.

    Each sees those of the `visible` places (default: all) that do not come after it, at `positions` (default: places).
    """
    visible = list(range(len(ids))) if visible is None else visible
    positions = visible if positions is None else positions
    q, k, v = projected([ids[place] for place in visible], layer, dtype)
    group = q.shape[1] // k.shape[1]
    q, k = (rotated(x, rope, positions) for x in (q, k))
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    own = torch.tensor(visible) >= start
    future = torch.tensor(visible) > torch.tensor(visible)[own][:, None]
    scores = torch.einsum("thd,khd->htk", q[own], k) / q.shape[-1] ** 0.5
    return torch.einsum("htk,khd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def close(found, expected) -> bool:
    """Equal but for rounding in the type that was found."""
    tolerance = 4e-2 if found.dtype == torch.bfloat16 else 1e-5
    return found.shape == expected.shape and bool((found.double() - expected).abs().max() <= tolerance)
