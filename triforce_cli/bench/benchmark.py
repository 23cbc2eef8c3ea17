"""What `bench` is asked to run and to write, and a benchmark whose model is opened."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.api.opened_model import OpenModel
from offload.memory.tier_settings import TierSettings
from offload.settings.config import GenerationConfig, Sampling, Speculation

from ..options.command_request import Request
from ..options.settings import Settings
from ..output.output_files import write_file
from ..output.plan_report import print_plan
from ..output.progress import ProgressDisplay
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..run.plan import fewest_on_device, plan_run, plan_tiers
from ..signals import DONE, INTERRUPTED
from .axes import BATCH, CONTEXT, Grouped, Values
from .options import STDOUT
from .page import page_text
from .peer import Peer
from .plot import plot
from .report import BATCHES, GRID, Report, csv_text
from .report_text import report_text


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request, and what to compare: a product of lists, each of which may have a single value.

    Args:
        texts: the prompts' names and texts.
        methods: None is all that can run.
        axes: the settings that vary, but for the context; the request's settings have the first value of each.
        contexts: tokens to use of each prompt; None is all.
        excerpts: prompts made from each text, from places that are far from each other.
        points: the file of finished runs.
        batches: numbers of sequences that are decoded together, the others from further places of the text.
        endings: what stands behind each text, by its name, such as a question about it; no context cuts it off.
        is_dataset: whether `excerpts` counts texts that are long enough, each a prompt.
        only: combinations of values that run, of all that the lists have; empty for all.
        kind: the type of the report. Of BATCHES, a batch of 1 is all sequences of the largest batch, one after the
            other.
        peers: other programs, which run each point of plain decoding.
    """

    request: Request
    texts: Sequence[tuple[str, str]]
    methods: tuple[str, ...] | None
    axes: Mapping[str, Values]
    contexts: tuple[int, ...] | None
    excerpts: int
    repeats: int
    points: Path | None = None
    batches: tuple[int, ...] = (1,)
    only: Sequence[Mapping[str, Any]] = ()
    endings: Mapping[str, str] = field(default_factory=dict)
    is_dataset: bool = False
    kind: str = GRID
    peers: Sequence[Peer] = ()

    @property
    def in_turn(self) -> bool:
        """Return whether batches are compared with the same sequences one after the other."""
        return self.kind == BATCHES

    @property
    def varied(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of all that varies."""
        contexts = {CONTEXT: self.contexts} if self.contexts is not None and len(self.contexts) > 1 else {}
        batches = {BATCH: self.batches} if len(self.batches) > 1 else {}
        return contexts | batches | {name: tuple(values) for name, values in self.axes.items()}

    def includes(self, values: Mapping[str, Any]) -> bool:
        """Return whether a combination of values runs."""
        named = [{name: each for name, each in one.items() if name in values} for one in self.only]
        return not named or any(each.items() <= values.items() for each in named)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Methods on one prompt that have been checked against their model; the weights are not loaded."""

    settings: Settings
    model: OpenModel
    ids: list[int]
    sampling: Sampling
    speculations: dict[str, Speculation]
    tiers: TierSettings | None

    @property
    def config(self) -> GenerationConfig:
        return self.settings.generation

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.ids) + self.config.max_new_tokens


def plan_bench_tiers(benchmark: Benchmark, terminal: Terminal) -> TierSettings | None:
    """Return one placement for all methods: that of the method with the fewest layers on the device."""
    model, settings = benchmark.model, benchmark.settings
    found = [
        plan_tiers(
            replace(model, speculation=method), replace(settings, speculation=method), benchmark.length, terminal
        )
        for method in benchmark.speculations.values()
    ]
    return fewest_on_device([tiers for tiers in found if tiers is not None])


def note_grouped(context: int | None, terminal: Terminal) -> None:
    """Print that a context is one number, where it was written as a list could be."""
    if isinstance(context, Grouped):
        terminal.note(f"--context {context:,} is one number; {context.hint}")


@dataclass(frozen=True, slots=True)
class BenchOutput:
    """The form of the output: JSON or tables, without progress, and files for the charts and a table."""

    json: bool
    quiet: bool
    plot: Path | None = None
    csv: Path | None = None
    page: Path | None = None

    def plan(
        self,
        model: OpenModel,
        settings: Settings,
        length: int,
        request: Request,
        terminal: Terminal,
        display: ProgressDisplay,
    ) -> int:
        """Write the plan of a dry run in place of a report; return the exit code. Closes the display."""
        found = plan_run(model, settings, length, terminal)
        display.close()  # the plan is the output
        return print_plan(replace(found, arguments=request.arguments), request.command, terminal, self.json)

    def write(self, report: Report, terminal: Terminal, interrupted: bool, to_files: bool = True) -> int:
        """Write the report; return the exit code. Raises TriforceError, OSError, BrokenPipeError."""
        with ExitStack() as last:  # each is tried, on a full disk too; stdout in the end: it may be a closed pipe
            if self.json:
                last.callback(terminal.write, json_line(**report.as_json(interrupted)))
            elif report.rows and self.csv == STDOUT:
                last.callback(terminal.write, csv_text(report))
            elif report.rows:
                last.callback(terminal.print, report_text(report, terminal.table_width))
            if report.rows and to_files:
                if self.page is not None:
                    last.callback(write_file, self.page, page_text(report))
                if self.plot is not None:
                    last.callback(plot, self.plot, report)
                if self.csv not in (None, STDOUT):
                    last.callback(write_file, self.csv, csv_text(report))
        return INTERRUPTED if interrupted else DONE
