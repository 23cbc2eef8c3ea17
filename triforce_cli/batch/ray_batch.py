"""A batch on a Ray cluster: its lines in pieces to Ray Data, whose actors answer them, and the results as they come.

Each result is written here, once; a piece whose results did not arrive is answered by the same command again.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from offload.errors import SettingsError, TriforceError, typed_error
from offload.units import counted

from ..distributed.rank import silent_terminal
from ..distributed.ray_cluster import RESULT, ROW, Workers, joined, mapped, workers_of
from ..options.declarations import AUTO
from ..options.request import OutputOptions, Request
from ..output.batch_display import BatchDisplay
from ..run.opened_request import open_request, stretch
from ..run.parallel import MOST
from ..run.run import Run
from .batch_item import BadLine, BatchItem, NumberedLine, parse_line
from .batch_run import BatchRun
from .result_file import ERROR, error_line

_BEGINNING = 1024  # characters that prompts of one document have in common
_PIECES = 4  # for each worker at least, so that all end at about the same time
_MOST_PIECES = 10_000


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What every worker is told: the request of the command, how it answers, and the tokens of the longest sequence."""

    request: Request
    output: OutputOptions
    parallel: int | str
    longest: int
    version: str


class Worker:
    """Answers pieces of a batch over one loaded model: a class for `ray.data.Dataset.map_batches`.

    What keeps its machine from working is the error of each line that it is given.
    """

    def __init__(self, job: WorkerJob) -> None:
        self._output, self._terminal = replace(job.output, quiet=True, verbose=0), silent_terminal()
        self._failure: TriforceError | None = None
        try:
            self._load(job)
        except Exception as error:  # of any kind: an actor that cannot be made would be made again and again
            failure = typed_error(error)
            self._failure = TriforceError(f"on {socket.gethostname()}: {failure.message}", failure.hint)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the results of the lines in column ROW in the column RESULT."""
        return {RESULT: np.array([json.dumps(self._answers(json.loads(each))) for each in batch[ROW]])}

    def _answers(self, lines: Sequence[NumberedLine]) -> list[str]:
        """Return the results of lines, as lines of JSON."""
        items = [parse_line(*line) for line in lines]
        if (failure := self._failure) is not None:
            return [error_line(each.line, each.id, failure.message, failure.hint) for each in items]
        results: list[str] = []
        display = BatchDisplay(self._terminal, shown=False)
        run = BatchRun(items, results.append, True, self._opened, self._terminal, self._output, display)
        run.run(self._run, self._parallel)
        return results

    def _load(self, job: WorkerJob) -> None:
        if version("triforce") != job.version:
            message = f"this machine has triforce {version('triforce')}, and the command is of {job.version}"
            raise SettingsError(message, "install the same version on every machine of the cluster")
        self._opened = open_request(job.request, self._terminal, quiet=True)
        if job.request.extend_context:
            self._opened = replace(self._opened, model=stretch(self._opened.model, job.longest, self._terminal))
        display = BatchDisplay(self._terminal, shown=False)
        self._run = Run(self._opened, job.longest, self._terminal, self._output, display)
        self._parallel = self._run.parallel(job.parallel)
        self._run.load()


def run_on_cluster(address: str, run: BatchRun, texts: Mapping[int, str], longest: int, parallel: int | str) -> int:
    """Answer the items of a batch on a cluster; return the exit code. Raises TriforceError.

    `texts` are the lines of the file by their numbers.
    """
    display, engine = run.display, run.opened.settings.engine
    display.loading(f"looking for the Ray cluster {address}")
    with joined(address):
        workers = workers_of(engine)
        for each in run.items:
            if isinstance(each, BadLine):
                run.fail(each.line, each.id, False, each.error)
        work = pieces([each for each in run.items if isinstance(each, BatchItem)], workers.count, parallel)
        if not run.output.quiet:
            run.terminal.note(f"{workers}, {counted(len(work), 'piece')} of work")
        display.hide()
        display.expect(len(run.items))
        display.loading(f"loading {engine.model}")
        rows = [json.dumps([(number, texts[number]) for number in piece]) for piece in work]
        arguments = (_worker_job(run, longest, parallel, workers),)
        try:
            for results in mapped(rows, Worker, arguments, workers) if rows else ():
                for result in json.loads(results):
                    _note(run, result)
        except KeyboardInterrupt:
            run.interrupted()
            raise
    return run.ended(counted(workers.count, "worker"))


def _worker_job(run: BatchRun, longest: int, parallel: int | str, workers: Workers) -> WorkerJob:
    request = run.opened.request
    settings, model = request.settings, Path(request.settings.engine.model)
    if model.exists():  # workers have another working folder
        settings = replace(settings, engine=replace(settings.engine, model=str(model.absolute())))
    if workers.cpus:  # several workers share a machine's cores
        settings = replace(settings, engine=replace(settings.engine, threads=workers.cpus))
    return WorkerJob(replace(request, settings=settings), run.output, parallel, longest, version("triforce"))


def _note(run: BatchRun, result: str) -> None:
    """Write a worker's line of JSON, and count it."""
    event = json.loads(result)
    if event["type"] == ERROR:
        run.fail(event["line"], event["id"], False, TriforceError(event["message"], event["hint"]))
    else:
        run.write(result)
        run.display.count(event["new_tokens"], event["prompt_tokens"])


def pieces(items: Sequence[BatchItem], workers: int, parallel: int | str) -> list[list[int]]:
    """Divide the items into pieces, each for one worker; return their lines. A common beginning makes neighbours."""
    order: dict[str, list[int]] = {}
    for item in items:
        order.setdefault(f"{item.system or ''}\n{item.prompt[:_BEGINNING]}", []).append(item.line)
    most = MOST if parallel == AUTO else int(parallel)
    size = max(min(most, -(-len(items) // (workers * _PIECES))), -(-len(items) // _MOST_PIECES), 1)
    ordered = [line for group in order.values() for line in group]
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]
