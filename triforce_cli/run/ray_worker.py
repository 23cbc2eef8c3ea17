"""A process of a Ray cluster, which loads the model once and works on what it is given."""

import json
import socket
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np

from offload.errors import SettingsError, TriforceError, typed_error

from ..distributed.rank import silent_terminal
from ..options.command_request import OutputOptions, Request
from ..output.batch_display import BatchDisplay
from .job import Job
from .model_request import open_request, stretch
from .text_generator import TextGenerator

ROW, RESULT = "row", "result"  # columns, of JSON


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What every worker is told: the request of the command, and the tokens of the longest sequence."""

    request: Request
    longest: int
    version: str


class LoadedWorker:
    """Works on rows over one loaded model: a class for `ray.data.Dataset.map_batches`.

    Attributes:
        failure: why this machine cannot work, which is the error of each row that it is given; None if it can.
    """

    def __init__(self, job: WorkerJob, output: OutputOptions) -> None:
        self.output, self.terminal = replace(output, quiet=True, verbose=0), silent_terminal()
        self.failure: TriforceError | None = None
        try:
            self._load(job)
            self.prepare()
        except Exception as error:  # of any kind: an actor that cannot be made would be made again and again
            failure = typed_error(error)
            self.failure = TriforceError(f"on {socket.gethostname()}: {failure.message}", failure.hint)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the results of rows in the column RESULT."""
        return {RESULT: np.array([json.dumps(self.work(json.loads(each))) for each in batch[ROW]])}

    def work(self, row: Any) -> Any:
        """Return the result of a row, for JSON."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Do what follows the loading of the model, and fails as it does."""

    def _load(self, job: WorkerJob) -> None:
        if version("triforce") != job.version:
            raise SettingsError(
                f"this machine has triforce {version('triforce')}, and the command is of {job.version}",
                "install the same version on every machine of the cluster",
            )
        self.opened = open_request(job.request, self.terminal, quiet=True)
        if job.request.extend_context:
            self.opened = replace(self.opened, model=stretch(self.opened.model, job.longest, self.terminal))
        display = BatchDisplay(self.terminal, shown=False)
        self.job = Job(self.opened, job.longest, self.terminal, self.output, display)
        loaded: list[TextGenerator] = []
        self.job.run(lambda load: loaded.append(load()))
        self.generator = loaded[0]
