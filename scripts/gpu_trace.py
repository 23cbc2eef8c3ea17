"""Keep profiler traces beside the results: why a line of the table is off can be read there afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpu_machine import Machine, SmallPages
from gpu_models import filled_cache, filled_runner, llama, random_model, resident_cache, run_rows, run_steps
from gpu_rows import Rows
from torch.profiler import ProfilerActivity, profile

from offload.memory.factory import TieredStoreFactory


def traces(machine: Machine, folder: Path, rows: Rows) -> dict:
    """Record a streamed pass of two layers, a hybrid one, and a step that is a CUDA graph; each to a file."""
    shape = llama(2, 64, 2, 128, 512, 8192) if machine.small else llama(2, 4096, 32, 11008, 32000, 131072)
    tokens = 1000 if machine.small else 32768
    model = random_model(shape, machine.dtype, machine.device)
    settings = SmallPages("hybrid", page_tokens=128 if machine.small else None)
    stores = TieredStoreFactory(model.operations, machine.device, settings, machine.link())
    cache = filled_cache(model, stores, tokens)
    runner = filled_runner(model, resident_cache(model, tokens))
    runs: dict[str, Callable[[], object]] = {
        "streamed or hybrid pass of 8 rows": partial(run_rows, model, cache, 8),
        "resident step of 8 rows": partial(run_steps, runner, tokens, 8),
    }
    kept = {}
    for name, run in runs.items():
        for _ in range(3):  # kernels are compiled, and the step is recorded
            run()
        machine.synchronize()
        activities = [ProfilerActivity.CPU, *([] if machine.small else [ProfilerActivity.CUDA])]
        with profile(activities=activities) as found:
            run()
            machine.synchronize()
        path = folder / f"trace-{name.replace(' ', '-')}.json.gz"
        found.export_chrome_trace(str(path))
        launches = sum("LaunchKernel" in each.name for each in found.events())
        rows.add(name, f"{path.stat().st_size / 1024:.0f} KiB", f"{path.name}, {launches} launches of kernels")
        kept[name] = path.name
    return {"traces": kept}
