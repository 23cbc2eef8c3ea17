"""Measure steps of models that are all on the device: passes of a few rows, and a draft model's steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from gpu_machine import Machine, SmallPages
from gpu_models import filled_cache, filled_runner, llama, random_model, resident_cache, run_rows, run_steps
from gpu_rows import Rows

from offload.architecture.config import ModelShape
from offload.caches.factory import draft_cache
from offload.memory.factory import TieredStoreFactory
from offload.model.decoder import Model
from offload.planning.passes import Passes
from offload.planning.plan import make_plan
from offload.sequence import TokenSequence
from offload.settings.config import Sampling, Speculation
from offload.settings.method_sizes import draft_chunk
from offload.speculation.drafters.drafter import DraftRunner, ModelDrafter
from offload.speculation.sampling.warp import Sampler

ROWS = (1, 8, 22)
SAMPLING = Sampling(temperature=0.6, top_p=0.9)  # the paper's


def draft_shape(machine: Machine, vocab: int) -> ModelShape:
    """Return the shape of JackFram/llama-68m, the draft model of the TriForce paper."""
    if machine.small:
        return llama(1, 32, 2, 64, vocab, 8192)
    return llama(2, 768, 12, 3072, vocab, 131072)


def draft_runner(machine: Machine, shape: ModelShape, settings: Speculation) -> DraftRunner:
    """Return a runner of a random draft model on a StreamingLLM cache."""
    model = random_model(shape, machine.dtype, machine.device)
    return DraftRunner(model, draft_cache(model, settings), draft_chunk(settings))


def resident_steps(machine: Machine, rows: Rows) -> dict:
    """Measure passes of a few rows over a resident cache, and steps of a draft model."""
    shape = llama(2, 64, 2, 128, 512, 8192) if machine.small else llama(16, 2048, 16, 5504, 32000, 32768)
    tokens = 1000 if machine.small else 16384
    settings = Speculation("triforce", "random")
    drafting = draft_shape(machine, shape.vocab)
    request = machine.request(shape, tokens, settings, "none", draft=drafting)
    passes = Passes(request, make_plan(request).placed)
    model = random_model(shape, machine.dtype, machine.device)
    rows.add("model", f"{shape.layers} layers of {shape.hidden}, {tokens:,} tokens on the device")
    _without_waits(machine, rows, model, tokens)
    runner = filled_runner(model, resident_cache(model, tokens))
    for count in ROWS:
        took = machine.seconds(lambda count=count: run_steps(runner, tokens, count), 10, 4)
        rows.compare(f"full pass of {count} rows", took, passes.full(count)[0].seconds)
    rows.compare("draft step", _draft_step(machine, drafting, settings), passes.draft_step())
    return {"shape": f"{shape.layers} layers of {shape.hidden}, {tokens:,} tokens"}


def _without_waits(machine: Machine, rows: Rows, model: Model, tokens: int) -> None:
    """Run a pass over a resident and over a streamed cache that fails if an operation waits for the device."""
    settings = SmallPages("stream", page_tokens=128 if machine.small else None)
    spread = TieredStoreFactory(model.operations, machine.device, settings, machine.link())
    tokens //= 4
    for name, cache in {
        "resident": resident_cache(model, tokens),
        "streamed": filled_cache(model, spread, tokens),
    }.items():
        run_rows(model, cache, 8)  # loads kernels
        ids = torch.ones(8, dtype=torch.long, device=machine.device)
        with machine.no_synchronization():
            model.forward(ids, cache)
        rows.add(f"a {name} pass waits for nothing", "not checked on a CPU" if machine.small else "yes")


def _draft_step(machine: Machine, shape: ModelShape, settings: Speculation) -> float:
    """Return the seconds that a draft model needs for a token of a draft, sampled as the paper does."""
    sampler = Sampler(SAMPLING, 0, shape.vocab, machine.device)
    runner = draft_runner(machine, shape, replace(settings, method="naive"))
    sequence = TokenSequence([1] * (2 * settings.window))
    list(runner.read(sequence))
    drafter, tokens = ModelDrafter(runner, sampler), 8
    return machine.seconds(lambda: drafter.propose(sequence, tokens), 5, 3) / tokens
