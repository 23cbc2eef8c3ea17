"""Compare attention over pages in host memory with the same keys and values on the device: every page counts once."""

from __future__ import annotations

from gpu_machine import Machine, SmallPages
from gpu_models import attended, attention_error, filled_cache, llama, random_model, same_cache
from gpu_rows import Rows, Skipped
from gpu_steps import ROWS

from offload.kernels.native import KernelUnavailable, find_kernel
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_attention import Balance

SHARES = {"streamed": 0.0, "on the host": 1.0, "hybrid": 0.5}  # the host's share of the pages
MOST_ERROR = {4: 1e-4, 2: 2e-2}  # of rounding, by the bytes of a number; without one of 32 pages it is .18


def pages(machine: Machine, rows: Rows) -> dict:
    """Compare the attention of each layer, of 1, 8 and 22 rows; a page that is wrong, missing or read twice fails."""
    shape = llama(2, 64, 2, 128, 512, 8192) if machine.small else llama(2, 4096, 32, 11008, 32000, 131072)
    tokens = 2000 if machine.small else 32768
    if not machine.fits_host(2 * shape.kv_bytes(tokens, machine.dtype.itemsize)):
        raise Skipped("the host has too little memory")
    model = random_model(shape, machine.dtype, machine.device)
    settings = SmallPages("hybrid", page_tokens=128 if machine.small else None)
    stores = TieredStoreFactory(model.operations, machine.device, settings, machine.link())
    cache = filled_cache(model, stores, tokens)
    tiers, most = cache.store.tiers, MOST_ERROR[machine.dtype.itemsize]
    number = len(range(0, tokens, tiers.format.tokens))
    rows.add("pages", f"{shape.layers} layers of {number}", f"{tokens:,} tokens, no two pages alike")
    resident = same_cache(model, cache)
    for way, share in SHARES.items():
        if share and not machine.small and not has_kernel():
            raise RuntimeError("without the native kernel, pages on the host are not compared")
        tiers.balance = Balance(share)
        for count in ROWS:
            error = attention_error(attended(model, cache, count), attended(model, resident, count))
            rows.agree(f"{way}, {count} rows", error, most)
    return {"pages": number}


def has_kernel() -> bool:
    """Return whether the native kernel can be loaded."""
    try:
        return find_kernel() is not None
    except KernelUnavailable:
        return False
