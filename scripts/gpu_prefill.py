"""Measure the prefill of a long offloaded prompt under a cap of device memory."""

from __future__ import annotations

import time

import torch
from gpu_machine import Machine
from gpu_models import llama, random_model, smaller
from gpu_rows import GIB, Rows

from offload.architecture.config import ModelShape
from offload.memory.factory import TieredStoreFactory
from offload.memory.tier_settings import TierSettings
from offload.planning.plan import Plan, make_plan
from offload.sequence import TokenSequence
from offload.settings.config import Speculation
from offload.speculation.passes.runner import Runner


def long_prefill(machine: Machine, rows: Rows) -> dict:
    """Prefill 64K tokens with a model of the shape of Llama-3.1-8B, or with fewer layers where memory is short."""
    shape = llama(2, 64, 4, 128, 512, 8192, 2) if machine.small else llama(32, 4096, 32, 14336, 128256, 131072, 8)
    tokens = 1500 if machine.small else 65536
    shape, plan = _fitting(machine, shape, tokens)
    with machine.capped():
        began = time.perf_counter()
        model = random_model(shape, machine.dtype, machine.device)
        by_layers = plan.placed.prefill_order == "layers"
        settings = TierSettings("stream", min(plan.placed.resident_layers, shape.layers - 1), by_layers=by_layers)
        stores = TieredStoreFactory(model.operations, machine.device, settings, machine.link())
        store = stores.new_store(shape, tokens, machine.dtype)
        cache = model.new_cache(tokens, store=store)
        kept = f"{settings.resident_layers} of {shape.layers} layers resident, {plan.placed.prefill_order} first"
        rows.add("placement", kept, f"{tokens:,} tokens, {plan.device.limit / GIB:.1f} GiB of device memory")
        rows.add("weights and pinned memory", f"{time.perf_counter() - began:.1f} s")
        runner = Runner(model, cache, plan.request.prefill_chunk, by_layers)
        ids = torch.randint(0, shape.vocab, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        took = machine.seconds(lambda: list(runner.prefill(TokenSequence(ids))), 1, 0)
        rows.compare("prefill", took, plan.ttft.seconds, "s")
        machine.compare_peak(rows, plan)
    return {"tokens": tokens, "placement": kept, "prefill_s": took}


def _fitting(machine: Machine, shape: ModelShape, tokens: int) -> tuple[ModelShape, Plan]:
    """Halve the layers until weights fit the device and the KV cache fits the host; return (shape, plan)."""
    while True:
        # In miniature, and on a card with room for everything, half of the layers are offloaded all the same.
        plan = make_plan(
            machine.request(shape, tokens, Speculation("ar"), prefill_chunk=256 if machine.small else 2048)
        )
        if plan.placed.resident_layers == shape.layers:
            half = machine.request(
                shape,
                tokens,
                Speculation("ar"),
                resident_layers=shape.layers // 2,
                prefill_chunk=plan.request.prefill_chunk,
            )
            plan = make_plan(half)
        weights = plan.placed.weight_layers == shape.layers and not plan.device.missing
        if weights and machine.fits_host(shape.kv_bytes(tokens, machine.dtype.itemsize)):
            return shape, plan
        if shape.layers == 1:
            raise RuntimeError(f"not even one layer of {tokens:,} tokens fits: {plan.shortage()}")
        shape = smaller(shape)
