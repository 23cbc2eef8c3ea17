"""A batch on a Ray cluster: the lines in pieces to Ray Data, whose actors answer them, and the results as they come.

Each result is written here, once; a piece whose results did not arrive is answered by the same command again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from offload.units import counted

from ..options.command_request import OutputOptions
from ..options.declarations import AUTO
from ..output.batch_display import BatchDisplay
from ..output.terminal import Terminal
from ..run.job import MOST
from ..run.model_request import ModelRequest
from ..run.ray_cluster import LoadedWorker, WorkerJob, Workers, joined, mapped, worker_job, workers_of
from .batch_files import ERROR, BatchFile, Line, PackedLine, Survey, error_line
from .batch_run import BatchOptions, BatchRun, end_interrupted, exit_code
from .line_request import Id, LineError, LineRequest, repeated

_BEGINNING = 1024  # characters that prompts of one document have in common
_PIECES = 4  # for each worker at least, so that all end at about the same time
_MOST_PIECES = 10_000


Places = list[tuple[int, int]]  # the numbers of lines, and where they begin in the file


class Worker(LoadedWorker):
    """Answers lines. An error of the machine is that of its lines."""

    def __init__(
        self, job: WorkerJob, output: OutputOptions, parallel: int | str, read: Callable[[Places], list[PackedLine]]
    ) -> None:
        """Load the model. `read` returns the lines at places of the file, as `Reader.read`."""
        self._read, self._wanted = read, parallel
        super().__init__(job, output)

    def prepare(self) -> None:
        self._parallel = self.job.parallel(self._wanted)

    def work(self, row: Places) -> list[str]:
        """Return the results of lines, as lines of JSON."""
        lines = [Line.unpacked(*packed) for packed in self._read(row)]
        if self.failure is not None:
            message, hint = self.failure.message, self.failure.hint
            return [error_line(each.number, each.request().id, message, hint) for each in lines]
        results: list[str] = []
        shown = self.terminal, self.output, BatchDisplay(self.terminal, shown=False)
        run = BatchRun(iter(lines), results.append, True, self.opened, self.generator, set(), *shown)
        run.run(self._parallel)
        return results


class Reader:
    """Reads lines for the workers, as an actor beside the command, so that no machine keeps the file in memory."""

    def __init__(self, process: int, descriptor: int) -> None:
        """Open the file that another process of this machine has open: it may have no name."""
        self._file = BatchFile(open(f"/proc/{process}/fd/{descriptor}", "rb"), "the batch")  # noqa: SIM115

    def read(self, places: Places) -> list[PackedLine]:
        return [self._file.line_at(*place).packed() for place in places]


def run_on_cluster(
    batch: BatchOptions,
    opened: ModelRequest,
    found: Survey,
    terminal: Terminal,
    output: OutputOptions,
    display: BatchDisplay,
) -> int:
    """Answer a batch on the cluster at `batch.cluster`; return the exit code. Raises TriforceError."""
    assert batch.cluster is not None and batch.file is not None
    display.loading(f"looking for the Ray cluster {batch.cluster}")
    with joined(batch.cluster):
        workers = workers_of(opened)
        run = _Run(batch, display)
        work = pieces(run.places(), workers.count, batch.parallel)
        if not output.quiet:
            terminal.note(f"{workers}, {counted(len(work), 'piece')} of work")
        display.hide()
        display.expect(found.requests)
        display.loading(f"loading {opened.settings.engine.model}")
        try:
            for result in _results(batch, opened, found.longest, output, workers, work):
                run.write(result)
        except KeyboardInterrupt:
            end_interrupted(display, terminal, output, batch.results is not None)
            raise
    display.close()
    if not output.quiet:
        terminal.note(display.statistics(counted(workers.count, "worker")))
    return exit_code(display, run.first_error, terminal)


class _Run:
    """The results of a batch: written as they come, and counted."""

    def __init__(self, batch: BatchOptions, display: BatchDisplay) -> None:
        self._batch, self._display = batch, display
        self._write = batch.writer(display)
        self.first_error: str | None = None

    def places(self) -> list[tuple[bytes, int, int]]:
        """Return where the lines are that are to be answered, behind what their prompts begin with, as a digest.

        The errors of lines that are no requests are written.
        """
        finished = self._batch.results.finished if self._batch.results is not None else set()
        first: dict[Id, int] = {}
        places = []
        for line in self._batch.lines():
            try:
                request = line.request()
                if (other := first.setdefault(request.id, line.number)) != line.number:
                    raise repeated(request, other)
                if request.id in finished:
                    continue
            except LineError as error:
                self.write(error_line(error.line, error.id, error.error.message, error.error.hint))
            else:
                places.append((_beginning(request), line.number, line.start))
        return places

    def write(self, result: str) -> None:
        """Write a line of JSON, and count it."""
        event = json.loads(result)
        self._write(result)
        if event["type"] == ERROR:
            self.first_error = self.first_error or f"line {event['line']}: {event['message']}"
            self._display.fail(has_run=False)
        else:
            self._display.count(event["new_tokens"], event["prompt_tokens"])


def _beginning(request: LineRequest) -> bytes:
    text = f"{request.system or ''}\n{request.prompt[:_BEGINNING]}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def pieces(places: list[tuple[bytes, int, int]], workers: int, parallel: int | str) -> list[Places]:
    """Divide the lines into pieces, each for one worker; those with a common beginning follow each other."""
    order: dict[bytes, Places] = {}
    for digest, number, start in places:
        order.setdefault(digest, []).append((number, start))
    most = MOST if parallel == AUTO else int(parallel)
    size = max(min(most, -(-len(places) // (workers * _PIECES))), -(-len(places) // _MOST_PIECES), 1)
    ordered = [place for group in order.values() for place in group]
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def _results(
    batch: BatchOptions,
    opened: ModelRequest,
    longest: int,
    output: OutputOptions,
    workers: Workers,
    pieces: list[Places],
) -> Iterator[str]:
    """Yield the results of pieces as they come. Raises TriforceError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    assert batch.file is not None
    reader = ray.remote(Reader).options(num_cpus=0, scheduling_strategy=here).remote(os.getpid(), batch.file.descriptor)
    arguments = worker_job(opened, longest, workers), output, batch.parallel, partial(_read, reader)
    for results in mapped([json.dumps(piece) for piece in pieces], Worker, arguments, workers):
        yield from json.loads(results)


def _read(reader: Any, places: Places) -> list[PackedLine]:
    import ray

    return ray.get(reader.read.remote(places))
