"""Measure passes of a 7B model's shape at 128K tokens, or of the largest part of it that fits the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from gpu_machine import Machine, SmallPages
from gpu_models import (
    attended,
    attention_error,
    filled_cache,
    filled_runner,
    llama,
    random_model,
    run_rows,
    run_steps,
    smaller,
)
from gpu_pages import has_kernel
from gpu_rows import GIB, Rows, Skipped
from gpu_steps import ROWS, draft_shape

from offload.architecture.config import ModelShape
from offload.caches.factory import selected_cache
from offload.caches.full import FullCache
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_attention import Balance
from offload.model.decoder import Model
from offload.planning.passes import Passes
from offload.planning.plan import Plan, make_plan
from offload.settings.config import Placement, Speculation
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner

ACCEPTANCE, DRAFT_ACCEPTANCE = 0.9, 0.5  # planted
ROOM = 512  # tokens that are decoded
MOST_ERROR = 0.05  # relative, between modes: rounding of many layers; without one of 128 pages it is .09
MODES = {"stream": (0.0, 1), "host": (1.0, 1), "hybrid": (None, 4)}  # the host's share, and passes before the measured


@dataclass
class Built:
    """A model with a full cache of random keys and values, and the plan that it was built by."""

    plan: Plan
    model: Model
    cache: FullCache
    full: Runner
    tokens: int  # in the cache
    middle: SelectedRunner | None = None


class LongContext:
    """A model at 128K tokens, for several parts of the check: `build` first, `free` last."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._built: Built | None = None

    @property
    def built(self) -> Built:
        """Return the model and its caches. Raises Skipped if they could not be built."""
        if self._built is None:
            raise Skipped("the model and its cache could not be built")
        return self._built

    def free(self) -> None:
        """Free the model and its caches."""
        self._built = None
        self._machine.clear()

    def build(self, rows: Rows) -> dict:
        """Build a model of Llama-2-7B's shape with a full cache; with fewer tokens and layers where memory is short."""
        machine, began = self._machine, time.perf_counter()
        shape = llama(4, 64, 2, 128, 512, 8192) if machine.small else llama(32, 4096, 32, 11008, 32000, 131072)
        plan, cut = _fitting(machine, shape, 3000 if machine.small else 131072)
        shape, tokens = plan.request.shape, plan.request.tokens
        model = random_model(shape, machine.dtype, machine.device)
        kept = min(plan.placed.resident_layers, shape.layers - 1)
        settings = SmallPages("hybrid", resident_layers=kept, page_tokens=256 if machine.small else None)
        stores = TieredStoreFactory(model.operations, machine.device, settings, machine.link())
        cache = filled_cache(model, stores, tokens - ROOM, ROOM)
        self._built = Built(plan, model, cache, filled_runner(model, cache), cache.length)
        size = f"{shape.layers} layers of {shape.hidden}, {tokens:,} tokens{cut}"
        where = f"{kept} layers resident of a {plan.device.limit / GIB:.1f} GiB cap"
        rows.add("placement", where, size)
        rows.add("weights, pinned memory and filling it", f"{time.perf_counter() - began:.1f} s")
        return {"shape": size, "placement": where}

    def verification(self, rows: Rows) -> dict:
        """Measure passes of a few rows: streamed, attended to by the host, and both."""
        machine, built = self._machine, self.built
        streamed = None
        for mode, (share, warm) in MODES.items():
            if mode != "stream" and not machine.small and not has_kernel():
                raise RuntimeError(f"{mode} was not measured: the native kernel is not built")
            passes = passes_of(built.plan, mode)
            for count in ROWS:
                built.cache.store.tiers.balance = Balance(share)
                took = machine.seconds(lambda count=count: run_rows(built.model, built.cache, count), 2, warm)
                rows.compare(f"{mode}, {count} rows", took, passes.full(count)[0].seconds)
            found = attended(built.model, built.cache, ROWS[-1])
            if streamed is None:
                streamed = found
            else:
                rows.agree(f"{mode}, attention beside streamed", attention_error(found, streamed), MOST_ERROR)
        built.cache.store.tiers.balance = Balance(0.0)
        return {}

    def retrieval(self, rows: Rows) -> dict:
        """Measure the first selection, and steps of the retrieval cache through its runner."""
        machine, built = self._machine, self.built
        settings = built.plan.request.speculation
        built.cache.store.tiers.balance = Balance(0.0)
        middle = built.middle = SelectedRunner(built.full, selected_cache(built.cache, settings))
        run_rows(built.model, built.cache, 1)  # the query that selects
        tokens = built.tokens
        first = machine.seconds(lambda: run_steps(middle, tokens, 1), 1, 0)
        rows.add("first step, with the selection", f"{first:.2f} s")
        passes = passes_of(built.plan, "stream")
        for count in ROWS:
            took = machine.seconds(lambda count=count: run_steps(middle, tokens, count), 10, 3)
            rows.compare(f"budget {settings.budget}, {count} rows", took, passes.retrieval(count))
        return {"first_s": first, "graphs": getattr(middle, "graphs", None) is not None}


def passes_of(plan: Plan, mode: str) -> Passes:
    """Return the predicted passes of a plan's placement with its offloaded KV attended to by `mode`."""
    placement: Placement = replace(plan.request.placement, offload=mode)
    return Passes(replace(plan.request, placement=placement), plan.placed)


def _fitting(machine: Machine, shape: ModelShape, tokens: int) -> tuple[Plan, str]:
    """Halve tokens and layers until the model fits; return (plan, remark on the reduction)."""
    asked = (shape.layers, tokens)
    settings = Speculation("triforce", "random", budget=256 if machine.small else 4096)
    rates = {"acceptance": ACCEPTANCE, "draft_acceptance": DRAFT_ACCEPTANCE}
    while True:
        resident = 1 if machine.small else None
        draft = draft_shape(machine, shape.vocab)
        plan = make_plan(machine.request(shape, tokens, settings, resident_layers=resident, draft=draft, **rates))
        away = shape.layers - plan.placed.resident_layers
        fits = plan.placed.weight_layers == shape.layers and not plan.device.missing
        if fits and machine.fits_host(away * shape.layer_kv_bytes(tokens, machine.dtype.itemsize)):
            break
        if fits and tokens > 8192:
            tokens //= 2
        elif shape.layers > 1:
            shape = smaller(shape)
        else:
            raise RuntimeError(f"not even one layer of {tokens:,} tokens fits: {plan.shortage()}")
    cut = "" if asked == (shape.layers, tokens) else f" (memory here is too small for {asked[0]} and {asked[1]:,})"
    return plan, cut
