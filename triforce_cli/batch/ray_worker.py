"""A process of a Ray cluster: it loads the model once, and answers the lines of a batch that it is given."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from offload.errors import SettingsError, TriforceError, typed_error

from ..distributed.rank import silent_terminal
from ..options.command_request import OutputOptions, Request
from ..output.batch_display import BatchDisplay
from ..run.job import Job
from ..run.model_request import ModelRequest, open_request, stretch
from .batch_files import BatchFile, Line, error_line
from .batch_run import BatchRun

if TYPE_CHECKING:
    from ..run.text_generator import TextGenerator

LINES, RESULTS = "lines", "results"  # columns
Places = list[tuple[int, int]]  # the numbers of lines, and where they begin in the file
Packed = tuple[int, int, str]  # as of `Line.packed`


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What every worker of a batch is told: the request of the command, and the tokens of the longest sequence."""

    request: Request
    longest: int
    parallel: int | str
    show_thinking: bool
    version: str


class Worker:
    """Answers lines: a class for `ray.data.Dataset.map_batches`. An error of the machine is that of its lines."""

    def __init__(self, job: WorkerJob, read: Callable[[Places], list[Packed]]) -> None:
        """Load the model. `read` returns the lines at places of the file, as `Reader.read`."""
        self._job, self._read, self._terminal = job, read, silent_terminal()
        self._output = OutputOptions(json=False, quiet=True, verbose=0, show_thinking=job.show_thinking)
        self._failure: TriforceError | None = None
        try:
            self._opened, self._generator, self._parallel = self._load()
        except Exception as error:  # of any kind: an actor that cannot be made would be made again and again
            self._failure = typed_error(error)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the results of lines in the column RESULTS: lists of lines of JSON, as JSON."""
        return {RESULTS: np.array([json.dumps(self._answers(json.loads(each))) for each in batch[LINES]])}

    def _load(self) -> tuple[ModelRequest, TextGenerator, int]:
        if version("triforce") != self._job.version:
            raise SettingsError(
                f"this machine has triforce {version('triforce')}, and the command is of {self._job.version}",
                "install the same version on every machine of the cluster",
            )
        request, longest = self._job.request, self._job.longest
        opened = open_request(request, self._terminal, quiet=True)
        if request.extend_context:
            opened = replace(opened, model=stretch(opened.model, longest, self._terminal))
        job = Job(opened, longest, self._terminal, self._output, BatchDisplay(self._terminal, shown=False))
        loaded: list[TextGenerator] = []
        job.run(lambda load: loaded.append(load()))
        return opened, loaded[0], job.parallel(self._job.parallel)

    def _answers(self, places: Places) -> list[str]:
        lines = [Line.unpacked(*packed) for packed in self._read(places)]
        if self._failure is not None:
            where = f"on {socket.gethostname()}: {self._failure.message}"
            return [error_line(each.number, each.request().id, where, self._failure.hint) for each in lines]
        results = _Collected()
        display = BatchDisplay(self._terminal, shown=False)
        run = BatchRun(
            _Lines(lines), results, self._opened, self._generator, set(), self._terminal, self._output, display
        )
        run.run(self._parallel)
        return results.lines


class Reader:
    """Reads lines for the workers, as an actor beside the command, so that no machine keeps the file in memory."""

    def __init__(self, process: int, descriptor: int) -> None:
        """Open the file that another process of this machine has open: it may have no name."""
        self._file = BatchFile(open(f"/proc/{process}/fd/{descriptor}", "rb"), "the batch")  # noqa: SIM115

    def read(self, places: Places) -> list[Packed]:
        """Return the lines at places."""
        return [self._file.line_at(*place).packed() for place in places]


@dataclass(frozen=True, slots=True)
class _Lines:
    """A source of lines that are there already."""

    found: list[Line]

    def lines(self) -> Iterator[Line]:
        return iter(self.found)


class _Collected:
    """Results that are kept until all are there."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        self.lines.append(line)
