"""The measurements of check_gpu.py, on a CUDA GPU or, in miniature over a simulated link, on the CPU."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_models import filled_cache, llama, random_model, smaller
from torch import Tensor

from offload.cache import FullCache
from offload.checkpoint import FolderCheckpoint
from offload.config import GenerationConfig, Placement, Sampling, Speculation
from offload.engine import Engine
from offload.events import Tokens
from offload.hierarchy import selected_cache
from offload.model import Model
from offload.native import KernelUnavailable, find_kernel
from offload.native.blocks import host_memory
from offload.operations import TorchOperations
from offload.placement import PlanRequest
from offload.plan import Plan, make_plan
from offload.resources import Hardware
from offload.shape import ModelShape
from offload.tiers import SimulatedLink, Spread, TierSettings
from offload.tiers.balance import Balance
from offload.tiers.link import Link, Pair
from offload.weights import load_model

ROOT = Path(__file__).parents[1]
GIB = 2**30
WANTED_OVERLAP = 1.15
BUDGET = 4096
Row = tuple[str, str, str]


class WithoutCopies:
    """A link that only says it has copied: what remains of a step is its computation."""

    def __init__(self, link: Link) -> None:
        self.statistics, self._link = link.statistics, link
        self.wait, self.finish, self.mark, self.seconds = link.wait, link.finish, link.mark, link.seconds

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> Any:
        return self._link.copy((), after)


class Machine:
    """What is measured on; sizes fit a GPU, or are small on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.small = device == "cpu"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        if not self.small and not torch.cuda.is_bf16_supported(including_emulation=False):
            self.dtype = torch.float16
        self.rate: float | None = None  # of the link, in bytes a second, once measured

    def link(self) -> Link:
        """The device's own, or a simulated one."""
        if self.small:
            return SimulatedLink(2e9)
        from offload.tiers.cuda import CudaLink

        return CudaLink(self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all."""
        if not self.small:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], times: int = 3, warm: int = 1) -> float:
        """The median of some runs."""
        taken = []
        for _ in range(warm + times):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return median(taken[warm:])

    def link_rates(self) -> dict:
        """Bandwidth, both ways, from pinned and from pageable memory, and both ways at once."""
        from offload.tiers.cuda import pinned_memory

        size, piece = (2**22, 2**20) if self.small else (2**29, 2**23)
        link, rates = self.link(), {}
        there = torch.empty(2, size, dtype=torch.uint8, device=self.device)
        kinds = {"pageable": host_memory} | ({} if self.small else {"pinned": pinned_memory})
        for kind, allocate in kinds.items():
            host = allocate((2, size), torch.uint8)
            host.fill_(1)
            down, up = (
                list(zip(*(x.split(piece) for x in pair), strict=True)) for pair in zip(there, host, strict=True)
            )
            up = [(target, source) for source, target in up]
            for way, jobs in {"to device": [down], "to host": [up], "both ways": [down, up]}.items():
                rates[f"{kind}, {way}"] = len(jobs) * size / self.seconds(lambda jobs=jobs: _copied(link, jobs))
            del host, down, up
        self.rate = rates.get("pinned, to device", rates["pageable, to device"])
        rows = [(name, f"{rate / 1e9:.1f} GB/s", "simulated" if self.small else "") for name, rate in rates.items()]
        return {"rows": rows, "bytes_per_s": rates}

    def overlap(self) -> dict:
        """Streamed steps beside their copies alone and their computation alone."""
        shape = llama(2, 64, 2, 128, 512, 8192) if self.small else llama(8, 4096, 32, 11008, 32000, 131072)
        tokens = 2000 if self.small else 32768
        model = random_model(shape, self.dtype, self.device)
        settings = TierSettings("stream", piece=128 if self.small else None)
        spread = Spread(model.operations, self.device, settings, self.link())
        cache = filled_cache(model, spread, tokens)
        tiers = cache.store.tiers
        step = self.seconds(lambda: _step(model, cache), 5, 2)
        tiers.ring.drop()
        whole = tokens // tiers.form.tokens
        pieces = [layer[i] for layer in tiers.pieces for i in range(whole)]
        copying = self.seconds(lambda: _into(spread.link, pieces, tiers.ring._buffers), 3)
        tiers.ring._link = WithoutCopies(spread.link)
        computing = self.seconds(lambda: _step(model, cache), 5, 2)
        ratio = step / max(copying, computing)
        remark = f"step {1e3 * step:.1f} ms, copies {1e3 * copying:.1f}, computation {1e3 * computing:.1f}"
        row = ("step / max(copy, compute)", f"{ratio:.3f}", f"{remark}; wanted below {WANTED_OVERLAP}")
        return {"rows": [row], "step_s": step, "copy_s": copying, "compute_s": computing, "ratio": ratio}

    def decoding(self) -> dict:
        """Greedy decoding with all KV in host memory, by several methods."""
        name, model, ids = self._decoder()
        spread = Spread(model.operations, self.device, TierSettings("stream"), self.link())
        engine = Engine(model, (), 512, spread=spread)
        new, settings = (8, {"budget": 128}) if self.small else (64, {"budget": 1024})
        rows, found = [], {}
        for method in ("ar", "retrieval", "auto"):
            emitted, took = _decode(engine, ids, new, Speculation(method, **settings))
            found[method] = {"ms": 1e3 * took, "ids": emitted}
            same = "same output" if emitted == found["ar"]["ids"] else "output differs: two tokens were as likely"
            gain = found["ar"]["ms"] / found[method]["ms"]
            rows.append((method, f"{1e3 * took:.2f} ms a token", f"{gain:.2f} of ar, {same}"))
        rows[0] = (*rows[0][:2], f"{name}, {len(ids):,} tokens")
        return {"rows": rows, "model": name, "tokens": len(ids), "methods": found}

    def _decoder(self) -> tuple[str, Model, list[int]]:
        """The embedded model with a book if it is here, else random weights with random tokens."""
        home = os.environ.get("TRIFORCE_HOME") or Path.home() / ".cache" / "triforce"
        folder = Path(home) / "models" / "smollm2-135m"
        if not self.small and folder.is_dir():
            checkpoint = FolderCheckpoint(folder)
            text = (ROOT / "examples" / "frankenstein.txt").read_text("utf-8")
            ids = checkpoint.load_tokenizer().encode(text[:40000])[:7900]
            model = load_model(checkpoint, self.dtype, self.device, lambda done, total: None, TorchOperations())
            return "SmolLM2-135M", model, list(ids)
        shape = llama(2, 64, 2, 128, 512, 8192) if self.small else llama(16, 2048, 16, 5504, 32000, 32768)
        ids = torch.randint(
            0, shape.vocab, (1500 if self.small else 16000,), generator=torch.Generator().manual_seed(0)
        )
        model = random_model(shape, self.dtype, self.device)
        return f"random weights, {shape.layers} layers of {shape.hidden}", model, ids.tolist()

    def long_context(self) -> dict:
        """Step times of Llama-2-7B's shape at 128K, as large as this machine's memory allows."""
        gc.collect()
        shape = llama(4, 64, 2, 128, 512, 8192) if self.small else llama(32, 4096, 32, 11008, 32000, 131072)
        shape, tokens, plan, cut = self._fitting(shape, 3000 if self.small else 131072)
        if not self.small:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        model = random_model(shape, self.dtype, self.device)
        settings = TierSettings("hybrid", resident_layers=plan.placed.resident_layers)
        cache = filled_cache(model, Spread(model.operations, self.device, settings, self.link()), tokens)
        size = f"{shape.layers} layers of {shape.hidden}, {tokens:,} tokens{cut}"
        where = f"{cache.store.tiers.resident_layers} layers resident of a {plan.device.limit / GIB:.1f} GiB cap"
        steps: dict[str, float] = {}
        rows: list[Row] = []
        for name, run in self._ways(model, cache):
            steps[name] = run()
            rows.append((name, f"{1e3 * steps[name]:.1f} ms a step", size if not rows else ""))
            if name == "streaming":
                rows.append(self._memory(plan))
        if "hybrid" not in steps:
            rows.append(("hybrid", "skipped", "the native kernel is not built"))
        return {"rows": [*rows, ("placement", where, "")], "shape": size, "steps_s": steps}

    def _ways(self, model: Model, cache: FullCache):
        """Streaming, hybrid, and the retrieval level, each as a measurement."""
        tiers = cache.store.tiers

        def full(share: float | None, warm: int) -> float:
            tiers.balance = Balance(share)
            return self.seconds(lambda: _step(model, cache), 3, warm)

        yield "streaming", lambda: full(0.0, 1)
        try:
            find_kernel()
            yield "hybrid", lambda: full(None, 4)
        except KernelUnavailable:
            pass
        # The newest chunks instead of those that a query points at: a step takes as long, and choosing is quick.
        selected = selected_cache(cache, Speculation("streaming", budget=256 if self.small else BUDGET))

        def retrieval() -> float:
            selected.adopt()
            return self.seconds(lambda: _step(model, selected), 10, 3)

        yield f"retrieval level, budget {256 if self.small else BUDGET}", retrieval

    def _memory(self, plan: Plan) -> Row:
        """What the device has held at most, beside what was planned."""
        planned, spare = plan.device.total, plan.device.parts.get("activations", 0)
        remark = f"planned {planned / GIB:.2f} GiB, of which {spare / GIB:.2f} for reading a prompt, which nothing did"
        if self.small:
            return ("peak memory", "not measured on a CPU", remark)
        free, total = torch.cuda.mem_get_info(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        return ("peak memory", f"{peak / GIB:.2f} GiB, {(total - free) / GIB:.2f} with the driver's", remark)

    def _fitting(self, shape: ModelShape, tokens: int) -> tuple[ModelShape, int, Plan, str]:
        """Less of everything until device and host have the room, and what that has left out."""
        asked = (shape.layers, tokens)
        cap = 24 * GIB
        if not self.small:
            cap = min(cap, int(0.9 * torch.cuda.mem_get_info(self.device)[0]))
        while True:
            plan = make_plan(self._request(shape, tokens, cap))
            away = shape.layers - plan.placed.resident_layers
            weights = plan.placed.weight_layers == shape.layers and not plan.device.missing
            if weights and away * shape.layer_kv_bytes(tokens + 1024, self.dtype.itemsize) < 0.7 * free_memory():
                break
            if weights and tokens > 8192:
                tokens //= 2
            elif shape.layers > 1:
                shape = smaller(shape)
            else:
                raise RuntimeError(f"not even one layer of {tokens:,} tokens fits: {plan.shortage()}")
        cut = "" if asked == (shape.layers, tokens) else f" (memory here is too small for {asked[0]} and {asked[1]:,})"
        return shape, tokens, plan, cut

    def _request(self, shape: ModelShape, tokens: int, cap: int) -> PlanRequest:
        """Only the placement is of interest: the rates are anything."""
        rates = {
            "bandwidth": 1e12,
            "flops": 1e14,
            "link": self.rate or 1e10,
            "host_bandwidth": 1e11,
            "host_flops": 1e12,
        }
        kind = "cpu" if self.small else "cuda"
        hardware = Hardware("here", kind, 1, cap, host_memory=None, **rates)
        placement = Placement("stream", memory=cap, resident_layers=1 if self.small else None)
        return PlanRequest("random", shape, tokens, hardware, placement, Speculation("ar"), 512, self.dtype.itemsize)


def free_memory() -> int:
    """Free bytes of the host."""
    try:
        from offload.system import free_host_memory
    except ImportError:  # without psutil
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free_host_memory()


def _copied(link: Link, jobs: list[list[Pair]]) -> None:
    for ticket in [link.copy(job) for job in jobs]:
        link.finish(ticket)


def _into(link: Link, pieces: list[Tensor], buffers: Sequence[Tensor]) -> None:
    """All pieces over the link, as fast as it can, into buffers in turns."""
    tickets = [link.copy([(buffers[i % len(buffers)], piece)]) for i, piece in enumerate(pieces)]
    link.finish(tickets[-1])


def _step(model: Model, cache: Any) -> None:
    """One more token, which is then taken back: every step is as long as the last."""
    length = cache.length
    token = torch.ones(1, dtype=torch.long, device=model.device)
    int(model.logits(model.forward(token, cache)).argmax())
    cache.truncate(length)


def _decode(engine: Engine, ids: list[int], new: int, settings: Speculation) -> tuple[list[int], float]:
    """The tokens behind the prompt, and seconds for each behind the first ones."""
    emitted, times = [], []
    for event in engine.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=new), settings):
        if isinstance(event, Tokens):
            emitted += event.ids
            times.append((time.perf_counter(), len(emitted)))
    (first, before), (last, after) = times[0], times[-1]
    return emitted, (last - first) / max(after - before, 1)
