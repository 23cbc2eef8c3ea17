"""A benchmark under way: what is finished, what is left, and the report of it."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from offload.speculation.levels.lossless import Replay
from offload.units import counted

from ..output.format import duration
from .axes import BATCH
from .cells import Cell, PointsFile, Record
from .ladder import drafter_of, output_of, verdict
from .opened import OpenBench
from .read_times import ReadTimes
from .report import BATCHES, BENCH, GRID, LADDER, Report, mean_of, provenance
from .rows import Finished
from .runs import UNKEPT, memory_of


@dataclass(slots=True)
class Measurement:
    """A benchmark under way: the finished runs of each cell by their repeat, and where new ones are written."""

    bench: OpenBench
    finished: dict[Cell, dict[int, Record]]
    file: PointsFile | None = None
    interrupted: bool = False
    engine: str = ""
    agreement: float | None = None
    prefill_s: float | None = None
    replays: dict[Hashable, Replay] = field(default_factory=dict)
    reads: ReadTimes = field(default_factory=ReadTimes)
    _started: float = field(default_factory=time.monotonic)
    _done: int = 0

    @property
    def pending(self) -> list[tuple[Cell, int]]:
        """Return the runs to do, in order: by prompt and context, then in rounds."""
        cells = self.bench.cells
        found = []
        for _, group in groupby(cells, key=self.place_of):
            each = list(group)
            rounds = [(cell, repeat) for repeat in range(self.bench.asked.repeats) for cell in each]
            found += [(cell, repeat) for cell, repeat in rounds if repeat not in self.finished.get(cell, {})]
        return found

    def place_of(self, cell: Cell) -> tuple[Hashable, ...]:
        """Return what the cells have in common that run after one prefill, or with prefills of their own."""
        return cell.prompt, cell.context, cell.batch > 1 or self.bench.asked.in_turn

    def finish(self, cell: Cell, record: Record) -> None:
        """Keep a finished run, also on disk. Raises OSError."""
        if self.file is not None and "error" not in record:  # what failed is tried again
            self.file.append({name: each for name, each in record.items() if name not in UNKEPT})
        self.finished.setdefault(cell, {})[record["repeat"]] = record
        self._done += 1

    def left(self, pending: int) -> str:
        """Return the time that so many runs will take, as text; "" before the first one is done."""
        seconds = (time.monotonic() - self._started) / self._done * pending if self._done else 0
        return f" · {duration(seconds)} left" if seconds else ""

    def interruption(self) -> str:
        """Return how far an interrupted benchmark has come, and how it goes on."""
        asked = self.bench.asked
        done = sum(map(len, self.finished.values()))
        count = f"{done} of {counted(len(self.bench.cells) * asked.repeats, 'run')}"
        if asked.points is None:
            return f"interrupted after {count}; with --points FILE, the same command would go on after them"
        return f"interrupted; {count} saved: run the same command again to go on"

    def report(self) -> Report:
        bench, asked = self.bench, self.bench.asked
        records = {cell: [runs[repeat] for repeat in sorted(runs)] for cell, runs in self.finished.items()}
        finished = Finished(list(bench.cells), bench.base, records)
        if asked.kind == LADDER:
            rows = [self._step(finished, cell) for cell in records]
        elif asked.kind == BENCH:
            rows = finished.methods(memory_of(bench.benchmark(next(iter(bench.cells)))))
        else:
            rows = finished.batches() if asked.kind == BATCHES else finished.points(asked.varied)
        every = [record for runs in records.values() for record in runs]
        load = mean_of(record.get("other_load_cores") for record in every)
        axes = asked.varied if asked.kind in (GRID, LADDER) else {}
        return Report(asked.kind, self._facts(every), rows, axes, other_load=load)

    def _step(self, finished: Finished, cell: Cell) -> dict[str, Any]:
        """Return the row of a cell of the ladder."""
        benchmark, name = self.bench.benchmark(cell), self.bench.prompts[cell.prompt].name
        alone = replace(benchmark, speculations={cell.method: benchmark.speculations[cell.method]})
        row = finished.step(cell)
        place: dict[str, Any] = {"text": name.rpartition(" · ")[0], "output": output_of(name), "context": cell.context}
        place |= {"filled": row.pop("prompt_tokens") + benchmark.config.max_new_tokens}
        place |= {"temperature": benchmark.sampling.temperature, "drafter": drafter_of(row["acceptance"])}
        kv = f"{benchmark.settings.engine.kv} ({str(benchmark.model.dtype).removeprefix('torch.')})"
        row |= {"kv": kv, "memory_bytes": memory_of(alone)[cell.method], "is_peer": False, "error": None}
        if self.bench.peer(cell) is not None:
            runs = self.finished[cell].values()
            memory = max((run["memory_bytes"] for run in runs if run.get("memory_bytes")), default=None)
            error = next((run["error"] for run in runs if "error" in run), None)
            row |= {"kv": "-", "memory_bytes": memory, "is_peer": True, "error": error}
        return place | row | {"verdict": verdict(row)}

    def _facts(self, records: list[Record]) -> dict[str, Any]:
        bench, asked, settings = self.bench, self.bench.asked, self.bench.widest.settings
        here = provenance(bench.model.device, self.engine)
        resolved = settings.described(bench.widest.sampling)
        points = [point.settings.described(point.sampling) for point in bench.cells.values()]
        differ = {name for point in points for name, value in point.items() if value != points[0][name]}
        varied = dict.fromkeys(name for name in resolved if name in differ or name in asked.varied)
        resolved = {name: value for name, value in resolved.items() if name not in ("method", "stop")}
        return here | {
            "machine": records[0]["machine"] if records else here["machine"],
            "model": settings.engine.model,
            "quantize": settings.engine.quantize,
            "agreement": self.agreement,
            **self._prompts(),
            "new_tokens": None if "max_new_tokens" in varied else settings.generation.max_new_tokens,
            "repeats": asked.repeats,
            "settings": resolved | {"device": bench.model.device.type} | varied,
        }

    def _prompts(self) -> dict[str, Any]:
        bench, asked = self.bench, self.bench.asked
        if asked.kind in (GRID, LADDER):
            batch = None if BATCH in asked.varied else asked.batches[0]
            return {"prompts": [{"name": each.name, "tokens": len(each.ids)} for each in bench.prompts], BATCH: batch}
        tokens = len(bench.widest.ids)
        rate = tokens / self.prefill_s if self.prefill_s else None
        return {"prompt_tokens": tokens, "prefill_s": self.prefill_s, "prefill_tokens_per_s": rate}
