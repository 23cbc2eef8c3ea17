"""Check attention to quantised keys and values on a GPU, over tiers and a disk too; measure steps over them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from gpu_machine import Machine, SmallPages
from gpu_models import llama, random_model, run_rows
from gpu_rows import Rows, Skipped
from torch import Tensor

from offload.architecture.config import ModelShape
from offload.architecture.footprint import page_tokens
from offload.architecture.kv_formats import GROUP
from offload.caches.full import FullCache
from offload.kernels import triton
from offload.kernels.kv_groups import dequantize_groups, quantize_groups
from offload.kernels.triton.accumulate import GroupAccumulator
from offload.memory.device_quantized_store import DeviceQuantizedStore
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_memory import allocator
from offload.memory.layered_store import LayeredStore
from offload.memory.staged_link import StagedLink
from offload.memory.store import Store
from offload.model.decoder import Model
from offload.planning.passes import Passes
from offload.planning.placement import place
from offload.settings.config import Speculation
from offload.settings.kv_formats import EXACT

MOST_ERROR = 1e-2  # of a pass in 16 bits, beside another order of its sums
RESIDENT = 1  # layers
ROOM = 64  # tokens that are decoded
PLACES = ("stream", "host", "hybrid", "disk")


def quantised_kv(machine: Machine, rows: Rows) -> dict:
    """Compare passes over tiers with those over one memory, and that with dequantised keys and values; time them."""
    shape = llama(2, 32, 2, 64, 128, 8192) if machine.small else llama(4, 4096, 32, 14336, 32000, 131072, 8)
    tokens, kinds = (300 if machine.small else 32768 + 300), ("q8",)
    if (reason := triton.why_not(machine.device, machine.dtype, shape.head_dim)) is not None:
        raise Skipped(f"Triton does not run here: {reason}")
    model = random_model(shape, machine.dtype, machine.device)
    for kind in kinds:
        model.kv = kind
        one = _filled(
            machine, DeviceQuantizedStore(shape, tokens + ROOM, machine.dtype, machine.device, kind), model, tokens
        )
        _check_attention(machine, rows, one.store)
        expected = _row(model, one)
        for place_ in PLACES:
            cache = _filled(machine, _tiered(machine, model, place_, kind, tokens), model, tokens)
            _check(rows, f"{kind}, {place_}, beside one memory", _row(model, cache), expected)
            if place_ == "stream":
                _time(machine, rows, f"{kind}, streamed", model, cache, RESIDENT)
            del cache
            machine.clear()
        _time(machine, rows, f"{kind}, resident", model, one, shape.layers)
        del one
        machine.clear()
        model.kv = EXACT
    return {"shape": f"{shape.layers} layers of {shape.hidden}, {tokens:,} tokens"}


def _tiered(machine: Machine, model: Model, place_: str, kind: str, tokens: int) -> Store:
    mode, link = ("stream" if place_ == "disk" else place_), machine.link()
    settings = SmallPages(mode, RESIDENT, page_tokens=_page(machine, model.shape))
    if place_ == "disk":
        settings = replace(settings, disk=Path(tempfile.gettempdir()))
        link = StagedLink(link, machine.device, allocator(machine.device))
    factory = TieredStoreFactory(model.operations, machine.device, settings, link, kv=kind)
    return factory.new_store(model.shape, tokens + ROOM, model.dtype)


def _groups(machine: Machine, shape: ModelShape, kind: str, number: int) -> Tensor:
    """Return the groups `[kv_heads, n, bytes]` of a page of random keys and values, those of its number."""
    random = torch.Generator(machine.device).manual_seed(number)
    size = (2, shape.kv_heads, _page(machine, shape) // GROUP, GROUP, shape.head_dim)
    return quantize_groups(*torch.randn(size, generator=random, device=machine.device))


def _page(machine: Machine, shape: ModelShape) -> int:
    """Return the tokens of a page."""
    return 128 if machine.small else page_tokens(shape, machine.dtype.itemsize)


def _filled(machine: Machine, store: Store, model: Model, tokens: int) -> FullCache:
    """Return a full cache of `tokens` random tokens, the same in every store and layer."""
    tiers, page = getattr(store, "tiers", None), _page(machine, store.shape)
    list(store.prepare())
    parts = [store.resident, store.far] if isinstance(store, LayeredStore) else [store]
    for part in parts:
        generator = torch.Generator(store.device).manual_seed(4)
        for each in part.ring.store.read(0, part.ring.store.capacity):  # keys, and values: views
            each[0].normal_(std=0.5, generator=generator)
            each[1:] = each[:1]
        part._newest, part._lost = tokens, 0
    for number in range(-(-tokens // page)):
        groups = _groups(machine, store.shape, parts[0].kind, number)
        if parts[0].tiers is None:
            there = parts[0].groups.memory[:, :, number * page // GROUP : (number + 1) * page // GROUP]
            there.copy_(groups[:, : there.shape[2]].expand_as(there))
        for layer in range(0 if tiers is None else len(tiers.pages)):
            ticket = tiers.link.copy([(tiers.pages[layer, number], groups.view(-1))], tiers.link.mark())
            tiers.link.finish(ticket)
    if tiers is not None:
        tiers.open_pages.clear()
        tiers.ring.drop()
    cache = model.new_cache(tokens + ROOM, store=store)
    cache.length = tokens
    return cache


def _row(model: Model, cache: FullCache) -> Tensor:
    """Return what the model computes of one token behind a filled cache."""
    hidden = model.forward(torch.ones(1, dtype=torch.long, device=model.device), cache).double()
    cache.truncate(cache.length - 1)
    return hidden


def _check(rows: Rows, what: str, found: Tensor, expected: Tensor, most: float = MOST_ERROR) -> None:
    """Add the relative error. Raises ArithmeticError if it is too large."""
    error = ((found - expected).norm() / expected.norm()).item()
    if not error < most:
        raise ArithmeticError(f"{what}: an error of {error:.1e}, where {most:g} is allowed")
    rows.add(what, f"error {error:.1e}", f"allowed {most:g}")


def _check_attention(machine: Machine, rows: Rows, store: DeviceQuantizedStore) -> None:
    """Compare the kernel with attention to the dequantised keys and values in fp64."""
    shape, groups = store.shape, store.groups.memory[0][:, :8]
    random = torch.Generator(machine.device).manual_seed(5)
    q = torch.randn((3, shape.heads, shape.head_dim), generator=random, device=machine.device).to(machine.dtype)
    result = GroupAccumulator(q, shape.kv_heads)
    result.attend_groups(slice(0, 3), groups, 0, 8)
    both = dequantize_groups(groups, shape.head_dim, torch.float64)
    keys, values = (x.flatten(1, 2).repeat_interleave(shape.heads // shape.kv_heads, 0) for x in both)
    logits = torch.einsum("thd,hkd->htk", q.double(), keys) * shape.head_dim**-0.5
    expected = torch.einsum("htk,hkd->thd", logits.softmax(-1), values)
    _check(rows, f"{store.kind}, the kernel beside fp64", result.output().double(), expected)


def _time(machine: Machine, rows: Rows, what: str, model: Model, cache: FullCache, resident: int) -> None:
    settings = Speculation("ar")
    asked = machine.request(model.shape, cache.length, settings, "stream", resident, kv=model.kv)
    passes = Passes(asked, place(asked))
    for count in (1,) if machine.small else (1, 8, 22):
        took = machine.seconds(lambda count=count: run_rows(model, cache, count), *_times(machine, 3, 1))
        rows.compare(f"{what}, {count} rows", took, passes.full(count)[0].seconds)


def _times(machine: Machine, times: int, warm: int) -> tuple[int, int]:
    """Return how often to run, and how often before; in miniature, Triton's interpreter is slow."""
    return (1, 0) if machine.small else (times, warm)
