"""The report of check_gpu.py: facts of the machine, and the results of its parts as JSON and as a Markdown table."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

from gpu_rows import Line

Result = dict  # "rows" are lines of the table, "comparisons" those with a prediction; the rest goes only to the JSON


def hardware(device: str) -> dict:
    """Return the facts of this machine: date, device, cores, versions."""
    import torch

    from triforce_cli.run.processor import processor

    found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": processor(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": str(torch.__version__),
        "kind": "miniature",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "host": found["device"],
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
        found |= {"kind": "gpu", "cuda": torch.version.cuda, "capability": f"{properties.major}.{properties.minor}"}
    return found


class Report:
    """The results, written after each part because a later one may kill the process."""

    def __init__(self, folder: Path, facts: dict, call: str = "") -> None:
        """`call` is the end of the files' names."""
        name = re.sub(r"[^a-z0-9]+", "-", str(facts["device"]).lower()).strip("-")
        self._stem = folder / f"{facts['date']}-{facts['kind']}-{name}{call}"
        self.file(".jsonl").write_text(json.dumps(facts) + "\n")
        self._facts = facts
        self._parts: dict[str, Result] = {}

    def file(self, ending: str) -> Path:
        """Return the path of a file of this report."""
        return self._stem.with_name(self._stem.name + ending)

    def tell(self, part: str, line: Line) -> None:
        """Add a line to the file of lines as they come, and show it: a run that is killed leaves what it had."""
        with self.file(".jsonl").open("a") as lines:
            lines.write(json.dumps([part, *line]) + "\n")
        print(f"{part}: {' | '.join(each for each in line if each)}", file=sys.stderr, flush=True)

    @property
    def failed(self) -> bool:
        """Return whether a part failed or a measurement is off."""
        return any(part["state"] == "failed" or self._off(part) for part in self._parts.values())

    def _off(self, part: Result) -> list[str]:
        """Return the lines of a part that are off; none in miniature, where times say nothing."""
        return part["off"] if self._facts["kind"] == "gpu" else []

    def add(self, name: str, result: Result) -> None:
        """Add the result of a part and rewrite both files."""
        self._parts[name] = result
        self.file(".json").write_text(json.dumps({"machine": self._facts, **self._parts}, indent=1) + "\n")
        self.file(".md").write_text(self.table() + "\n")

    def table(self) -> str:
        """Return the results as a Markdown table."""
        title = ", ".join(f"{name} {value}" for name, value in self._facts.items() if name not in ("date", "device"))
        lines = [f"{self._facts['date']}, {self._facts['device']}; {title}", ""]
        lines += ["| part | what | result | remark |", "|---|---|---|---|"]
        for part, result in self._parts.items():
            for what, value, remark in result["rows"]:
                marked = f"**off**: {remark}" if what in self._off(result) else remark
                lines.append("| " + " | ".join(x.replace("|", "/") for x in (part, what, value, marked)) + " |")
        return "\n".join(lines)
