"""A worker of a batch on a Ray cluster: it answers the lines that it is given."""

from collections.abc import Callable

from ..options.command_request import OutputOptions
from ..output.batch_display import BatchDisplay
from ..run.ray_worker import LoadedWorker, WorkerJob
from .batch_files import BatchFile, Line, Packed, error_line
from .batch_run import BatchRun

Places = list[tuple[int, int]]  # the numbers of lines, and where they begin in the file


class Worker(LoadedWorker):
    """Answers lines. An error of the machine is that of its lines."""

    def __init__(
        self, job: WorkerJob, output: OutputOptions, parallel: int | str, read: Callable[[Places], list[Packed]]
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

    def read(self, places: Places) -> list[Packed]:
        """Return the lines at places."""
        return [self._file.line_at(*place).packed() for place in places]
