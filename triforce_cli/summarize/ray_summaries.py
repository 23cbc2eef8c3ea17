"""Summaries on a Ray cluster: each document goes to one worker, with all that is asked about it.

A document's texts are saved where they arrive, so that the same command resumes; they are written in their order.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from io import StringIO
from itertools import groupby
from typing import Any

from offload.errors import TriforceError, typed_error
from offload.system.machine import default_home
from offload.units import counted

from ..options.command_request import OutputOptions
from ..output.batch_display import BatchDisplay
from ..output.progress import RunFacts
from ..output.renderers import Renderer
from ..output.stdout_formats import JsonOutput, TextOutput
from ..output.terminal import Terminal
from ..output.turns import Section, Turn, Turns
from ..run.job import check_parallel
from ..run.model_request import ModelRequest
from ..run.ray_cluster import LoadedWorker, WorkerJob, joined, mapped, worker_job, workers_of
from .instructions import AnswerStyle, Templates
from .map_reduce import MapReduce, Task, part_facts, steps
from .passages import Answer, FinishedParts, PartsLeft, generate_in_order
from .together import AnswersTogether


@dataclass(frozen=True, slots=True)
class SummaryOptions:
    """What workers are told besides the tasks."""

    style: AnswerStyle
    templates: Templates
    parallel: int | str


class _Texts(Renderer):
    """The output of each section by itself, without what stands above it."""

    def __init__(self, output: OutputOptions) -> None:
        self._sections: list[StringIO] = []
        terminal = Terminal(StringIO(), StringIO(), StringIO(), color="never")
        self.display = _Meters(terminal, shown=False)
        form = JsonOutput() if output.json else TextOutput(output.show_thinking)
        super().__init__(terminal, form, quiet=True, display=self.display)

    def section(self, section: Section) -> None:
        self._sections.append(StringIO())
        self._terminal.redirect(self._sections[-1])

    def read(self) -> list[str]:
        return [each.getvalue() for each in self._sections]

    def counts(self) -> list[int]:
        meters = self.display.meters
        return [sum(each.new_tokens for each in meters), sum(each.prompt_tokens for each in meters)]


class _Meters(BatchDisplay):
    """The meters of all sequences."""

    def __init__(self, terminal: Terminal, shown: bool) -> None:
        super().__init__(terminal, shown)
        self.meters: list[Any] = []

    def start(self, facts: RunFacts) -> None:
        super().start(facts)
        self.meters.append(facts.meter)


class Worker(LoadedWorker):
    """Answers what is asked about documents. An error of the machine is that of its documents."""

    def __init__(self, job: WorkerJob, output: OutputOptions, options: SummaryOptions) -> None:
        self._longest, self._options = job.longest, options
        super().__init__(job, output)

    def work(self, row: Any) -> Any:
        """Return the row's number, the output of each task, what was counted, and the error that ended them, if any."""
        number, tasks = row[0], [Task.unpacked(*each) for each in row[1]]
        if self.failure is not None:
            return number, [], [0, 0], [self.failure.message, self.failure.hint]
        texts = _Texts(self.output)
        try:
            self._answer(tasks, texts)
        except Exception as error:  # of any kind: the next document may have none
            failure = typed_error(error)
            return number, texts.read(), texts.counts(), [failure.message, failure.hint]
        return number, texts.read(), texts.counts(), None

    def _answer(self, tasks: Sequence[Task], texts: _Texts) -> None:
        opened, options = self.opened, self._options
        home = opened.request.home or default_home()
        finished = FinishedParts(home, part_facts(opened), lambda text: None)
        reading = MapReduce(opened, options.templates, finished, self.terminal, quiet=True)
        answers = [Answer(task.section, steps(task, reading, options.style)) for task in tasks]
        whole = all(task.prompt is not None for task in tasks)
        parallel = 1
        if not self.job.is_offloaded:
            parallel = check_parallel(options.parallel, opened, self._longest, len(tasks) if whole else None)
        if parallel == 1:
            generate_in_order(answers, self.generator, finished, texts, PartsLeft(0))
        else:
            AnswersTogether(answers, finished, texts, texts.display).generate(self.generator, parallel)
        finished.clear()


def run_on_cluster(
    address: str,
    tasks: Sequence[Task],
    options: SummaryOptions,
    opened: ModelRequest,
    longest: int,
    terminal: Terminal,
    output: OutputOptions,
    renderer: Renderer,
) -> None:
    """Answer tasks on the cluster at `address`. Raises TriforceError: the first document's, once all are answered."""
    renderer.loading(f"looking for the Ray cluster {address}")
    with joined(address):
        workers = workers_of(opened)
        facts = [part_facts(opened), astuple(options.style), astuple(output)]
        finished = FinishedParts(opened.request.home or default_home(), facts, terminal.warn)
        run = _Run(tasks, finished, renderer, terminal)
        rows = run.rows()
        if not output.quiet:
            terminal.note(str(workers))
            if reused := run.documents - len(rows):
                terminal.note(f"{reused:,} of {counted(run.documents, 'document')} reused from an earlier run")
        display = renderer.for_batch()
        display.expect(len(rows))
        display.loading(f"loading {opened.settings.engine.model}")
        arguments = worker_job(opened, longest, workers), output, options
        try:
            for result in mapped(rows, Worker, arguments, workers):
                run.end(display, *json.loads(result))
        except KeyboardInterrupt:
            run.turns.flush()
            terminal.after_ctrl_c()
            if finished.any_used and not output.quiet:
                terminal.note("the finished documents are saved: run the same command again to resume after them")
            raise
    display.close()
    if not output.quiet:
        terminal.note(display.statistics(counted(workers.count, "worker")))
    run.raise_first()
    finished.clear()


class _Run:
    """The documents of a run: their outputs in turn, and the errors of those that failed."""

    def __init__(self, tasks: Sequence[Task], finished: FinishedParts, renderer: Renderer, terminal: Terminal) -> None:
        self._documents = [list(each) for _, each in groupby(tasks, key=lambda task: id(task.document))]
        self._finished, self._renderer, self._terminal = finished, renderer, terminal
        self._errors: dict[int, TriforceError] = {}
        self.turns = Turns()
        self._turns: list[Turn] = [self.turns.add() for _ in self._documents]

    @property
    def documents(self) -> int:
        return len(self._documents)

    def rows(self) -> list[str]:
        """Return the documents that no earlier run has finished; write the texts of the others."""
        rows = []
        for number, tasks in enumerate(self._documents):
            if (text := self._finished.find(_ids(tasks))) is not None:
                self._write(number, json.loads(text))
            else:
                rows.append(json.dumps([number, [task.packed() for task in tasks]]))
        return rows

    def end(
        self, display: BatchDisplay, number: int, texts: list[str], counts: list[int], error: list[str] | None
    ) -> None:
        """Write, save and count a document that a worker has ended."""
        tasks = self._documents[number]
        if error is None:
            self._finished.save(_ids(tasks), json.dumps(texts))
            display.count(*counts)
        else:
            self._errors[number] = TriforceError(f"{tasks[0].section.document}: {error[0]}", error[1])
            display.fail(has_run=False)
        self._write(number, texts)

    def raise_first(self) -> None:
        """Raise the error of the first document that has one; warn of the others."""
        errors = [self._errors[number] for number in sorted(self._errors)]
        for each in errors[1:]:
            self._terminal.warn(str(each))
        if errors:
            raise errors[0]

    def _write(self, number: int, texts: list[str]) -> None:
        turn = self._turns[number]
        for task, text in zip(self._documents[number], texts, strict=False):  # an error has ended the others
            turn(partial(self._renderer.section, task.section))
            turn(partial(self._renderer.write, text))
        turn.end()


def _ids(tasks: Sequence[Task]) -> list[int]:
    """Return the tokens of a document's prompts, one after the other, behind their number."""
    return [len(tasks), *(id for task in tasks for id in task.tokens)]
