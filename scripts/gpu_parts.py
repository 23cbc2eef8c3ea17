"""Measurements of the link, of overlap and of decoding, for check_gpu.py."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_machine import Machine, SmallPages
from gpu_models import filled_cache, llama, random_model, run_rows
from gpu_rows import Rows
from torch import Tensor

from offload.engine import Engine
from offload.events import Tokens
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_memory import host_memory
from offload.memory.link import Link, Pair
from offload.memory.tier_settings import TierSettings
from offload.model.decoder import Model
from offload.settings.config import GenerationConfig, Sampling, Speculation

ROOT = Path(__file__).parents[1]
WANTED_OVERLAP = 1.15
MOST_MARGIN = {
    4: 1e-3,
    2: 0.1,
}  # by the bytes of a number: of two logits that rounding may exchange, in standard deviations


class WithoutCopies:
    """A link that copies nothing, so that a step is its computation alone."""

    def __init__(self, link: Link) -> None:
        self.statistics, self._link = link.statistics, link
        self.wait, self.finish, self.mark, self.seconds = link.wait, link.finish, link.mark, link.seconds

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> Any:
        return self._link.copy((), after)


def link_rates(machine: Machine, rows: Rows) -> dict:
    """Measure the bandwidth to the device, to the host and both at once, from pinned and from pageable memory."""
    from offload.memory.host_memory import pinned_memory

    size, piece = (2**22, 2**20) if machine.small else (2**29, 2**23)
    link, rates = machine.link(), {}
    there = torch.empty(2, size, dtype=torch.uint8, device=machine.device)
    kinds = {"pageable": host_memory} | ({} if machine.small else {"pinned": pinned_memory})
    for kind, allocate in kinds.items():
        host = allocate((2, size), torch.uint8)
        host.fill_(1)
        down, up = (list(zip(*(x.split(piece) for x in pair), strict=True)) for pair in zip(there, host, strict=True))
        up = [(target, source) for source, target in up]
        for way, jobs in {"to device": [down], "to host": [up], "both ways": [down, up]}.items():
            rate = rates[f"{kind}, {way}"] = len(jobs) * size / machine.seconds(lambda jobs=jobs: _copied(link, jobs))
            rows.append((f"{kind}, {way}", f"{rate / 1e9:.1f} GB/s", "simulated" if machine.small else ""))
        del host, down, up
    return {"bytes_per_s": rates}


def overlap(machine: Machine, rows: Rows) -> dict:
    """Compare a streamed step with its copies alone and its computation alone."""
    shape = llama(2, 64, 2, 128, 512, 8192) if machine.small else llama(8, 4096, 32, 11008, 32000, 131072)
    tokens = 2000 if machine.small else 32768
    model = random_model(shape, machine.dtype, machine.device)
    settings = SmallPages("stream", page_tokens=128 if machine.small else None)
    stores = TieredStoreFactory(model.operations, machine.device, settings, machine.link())
    cache = filled_cache(model, stores, tokens)
    tiers = cache.store.tiers
    took = machine.seconds(lambda: run_rows(model, cache, 1), 5, 2)
    tiers.ring.drop()
    whole = tokens // tiers.format.tokens
    pages = [layer[i : min(i + tiers.run, whole)] for layer in tiers.pages for i in range(0, whole, tiers.run)]
    copying = machine.seconds(lambda: _into(stores.link, pages, tiers.ring.buffers), 3)
    tiers.ring._link = WithoutCopies(stores.link)
    computing = machine.seconds(lambda: run_rows(model, cache, 1), 5, 2)
    ratio = took / max(copying, computing)
    remark = f"step {1e3 * took:.1f} ms, copies {1e3 * copying:.1f}, computation {1e3 * computing:.1f}"
    if machine.small:
        remark += " (too small to mean anything)"
    rows.append(("step / max(copy, compute)", f"{ratio:.3f}", f"{remark}; wanted below {WANTED_OVERLAP}"))
    return {"step_s": took, "copy_s": copying, "compute_s": computing, "ratio": ratio}


def decoding(machine: Machine, rows: Rows) -> dict:
    """Measure greedy decoding with all KV in host memory, by several methods."""
    name, model, ids = _decoder(machine)
    stores = TieredStoreFactory(model.operations, machine.device, TierSettings("stream"), machine.link())
    engine = Engine(model, (), 512, stores=stores)
    new, settings = (8, {"budget": 128}) if machine.small else (64, {"budget": 1024})
    rows.append(("prompt", f"{len(ids):,} tokens", name))
    found = {}
    for method in ("ar", "retrieval", "auto"):
        emitted, took = _decode(engine, ids, new, Speculation(method, **settings))
        found[method] = {"ms": 1e3 * took, "ids": emitted}
        same = verdict(model, ids, found["ar"]["ids"], emitted, MOST_MARGIN[machine.dtype.itemsize])
        gain = found["ar"]["ms"] / found[method]["ms"]
        rows.append((method, f"{1e3 * took:.2f} ms a token", f"{gain:.2f} of ar, {same}"))
    return {"model": name, "tokens": len(ids), "methods": found}


def verdict(model: Model, ids: list[int], plain: list[int], emitted: list[int], most: float) -> str:
    """Return whether an output is the plain one. Raises RuntimeError if it is another by more than rounding.

    Where the two differ first, the logits of their tokens must be as close as rounding makes them.
    """
    at = next((i for i, pair in enumerate(zip(plain, emitted, strict=False)) if len(set(pair)) > 1), None)
    if at is None:
        if len(plain) != len(emitted):
            raise RuntimeError(f"wrong text: {len(emitted)} tokens where plain decoding has {len(plain)}")
        return "same output"
    sequence = torch.tensor([*ids, *plain[:at]], device=model.device)
    cache = model.new_cache(len(sequence))
    with torch.inference_mode():
        for part in sequence.split(512):
            hidden = model.forward(part, cache)
        logits = model.logits(hidden[-1:])[0].float()
    two = logits[[plain[at], emitted[at]]]
    margin = ((logits.max() - two.min()) / logits.std()).item()  # plain decoding may be wrong too
    told = f"token {at}: {plain[at]} or {emitted[at]} is {margin:.1e} standard deviations below the largest logit"
    if not margin <= most:
        raise RuntimeError(f"wrong text at {told}, where rounding may be {most:g}")
    return f"output differs at {told}"


def _decoder(machine: Machine) -> tuple[str, Model, list[int]]:
    """Return (name, model, prompt): the embedded model and a book if the model is here, else both random."""
    home = os.environ.get("TRIFORCE_HOME") or Path.home() / ".cache" / "triforce"
    folder = Path(home) / "models" / "smollm2-135m"
    if not machine.small and folder.is_dir():
        checkpoint = FolderCheckpoint(folder)
        text = (ROOT / "examples" / "frankenstein.txt").read_text("utf-8")
        ids = checkpoint.load_tokenizer().encode(text[:40000], special_tokens=True)[:7900]
        model = load_model(checkpoint, machine.dtype, machine.device, lambda done, total: None, TorchOperations())
        return "SmolLM2-135M", model, list(ids)
    shape = llama(2, 64, 2, 128, 512, 8192) if machine.small else llama(16, 2048, 16, 5504, 32000, 32768)
    ids = torch.randint(0, shape.vocab, (1500 if machine.small else 16000,), generator=torch.Generator().manual_seed(0))
    model = random_model(shape, machine.dtype, machine.device)
    return f"random weights, {shape.layers} layers of {shape.hidden}", model, ids.tolist()


def _copied(link: Link, jobs: list[list[Pair]]) -> None:
    for ticket in [link.copy(job) for job in jobs]:
        link.finish(ticket)


def _into(link: Link, pages: list[Tensor], buffers: Sequence[Tensor]) -> None:
    """Copy all pages over the link into the buffers in turn, and wait for the last copy."""
    tickets = [link.copy([(buffers[i % len(buffers)][: len(piece)], piece)]) for i, piece in enumerate(pages)]
    link.finish(tickets[-1])


def _decode(engine: Engine, ids: list[int], new: int, settings: Speculation) -> tuple[list[int], float]:
    """Return the new tokens, and the seconds per token after the first event."""
    emitted, times = [], []
    for event in engine.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=new), settings):
        if isinstance(event, Tokens):
            emitted += event.ids
            times.append((time.perf_counter(), len(emitted)))
    (first, before), (last, after) = times[0], times[-1]
    return emitted, (last - first) / max(after - before, 1)
