"""Runs a batch: requests are taken from the file as others end, and each result is written as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload.batching.batch import Failed
from offload.batching.request import BatchRequest, Events
from offload.errors import InternalError, PromptError, TriforceError, typed_error
from offload.events import Event
from offload.loading.tokenizers.text_stream import stream_text
from offload.metrics import Meter
from offload.model.decoder import QuantizedCopy
from offload.settings.method_sizes import uses_copy
from offload.units import counted

from ..distributed.rank import broadcast
from ..exit_codes import DONE, FAILED
from ..options.approximate import approximation_warnings
from ..options.request import OutputOptions, Request
from ..output.batch_display import BatchProgress
from ..output.format import rounded
from ..output.statistics import quantized_warning
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..run.concurrency import Concurrency
from ..run.load import LoadedEngine, load_engine, plan_longest, print_dry_run
from ..run.model_request import ModelRequest, Prompt, open_request, stretch
from ..run.parallel import check_parallel
from ..run.prompt_cache import LABEL, short_label
from ..run.text_run import text_layer
from .batch_files import RESULT, BatchFile, Line, ResultFile, error_line
from .line_request import Id, LineError, LineRequest
from .survey import Survey, opened_for, survey

_LEFT_OUT = ("settings", "verify", "load_s")  # of a summary: the same for all, or never there


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A batch: the lines, where the results go (None: stdout), and how many run together, a number or "auto".

    Only the first rank has the files.
    """

    file: BatchFile | None
    results: ResultFile | None
    parallel: int | str


@dataclass(frozen=True, slots=True)
class _Running:
    """A sequence under way."""

    line: LineRequest
    opened: ModelRequest
    prompt: Prompt
    meter: Meter


def run_batch(
    batch: BatchOptions, request: Request, terminal: Terminal, output: OutputOptions, progress: BatchProgress
) -> int:
    """Answer all requests; return the exit code, FAILED if one of them has an error. Raises TriforceError."""
    opened = open_request(request, terminal, output.quiet)
    finished = batch.results.finished if batch.results is not None else set()
    alone = replace(opened, request=replace(request, group=None))  # rank 0 surveys, while the others wait for it
    found = Survey(**broadcast(request.group, lambda: asdict(survey(batch.file, alone, finished))))
    if found.answered and not output.quiet:
        total = counted(found.requests + found.answered, "request")
        terminal.note(f"{found.answered:,} of {total} have a result already, and are not run again")
    if not found.requests:
        return DONE
    if request.extend_context:
        opened = replace(opened, model=stretch(opened.model, found.longest, terminal))
    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    tiers = None if request.dry_run else plan_longest(opened, found.longest, terminal)
    # Buffers of offloaded keys and values are planned for one sequence.
    parallel = 1 if tiers is not None else check_parallel(batch.parallel, opened, found.longest, found.requests)
    parallel = broadcast(request.group, lambda: parallel)
    if tiers is not None and batch.parallel != 1 and found.requests > 1 and not output.quiet:
        terminal.note("keys and values, or experts, are offloaded: one sequence at a time")
    if request.dry_run and not output.quiet:
        terminal.note(f"the plan is that of the longest request; {parallel} run together")
    if request.dry_run:
        return print_dry_run(opened, found.longest, terminal, output, progress.display)
    loaded = load_engine(opened, found.longest, tiers, progress.display)
    progress.start(found.requests)
    return _Run(batch, opened, loaded, finished, terminal, output, progress).run(parallel)


class _Run:
    """The requests of a batch over one loaded engine."""

    def __init__(
        self,
        batch: BatchOptions,
        opened: ModelRequest,
        loaded: LoadedEngine,
        finished: set[Id],
        terminal: Terminal,
        output: OutputOptions,
        progress: BatchProgress,
    ) -> None:
        self._batch, self._opened, self._loaded = batch, opened, loaded
        self._terminal, self._output, self._progress = terminal, output, progress
        self._write: Callable[[str], None] = progress.display.write if batch.results is None else batch.results.write
        self._lines: dict[Id, int] = {}  # by the ids that they have, of all requests so far
        self._finished = finished
        self._running: dict[int, _Running] = {}  # by line
        self._concurrency = Concurrency()
        self._agreement: float | None = None
        self._copy: QuantizedCopy | None = None
        self._is_prepared = False
        self._first_error: str | None = None

    def run(self, parallel: int) -> int:
        """Run up to `parallel` requests at a time; return the exit code."""
        try:
            with closing(self._loaded.engine.generate_batch(self._requests(), parallel)) as events:
                for line, event in events:
                    self._observe(line, event)
        except KeyboardInterrupt:
            self._progress.display.hide()
            self._terminal.after_ctrl_c()
            if not self._output.quiet:
                self._terminal.note(self._interrupted())
            raise
        self._progress.display.close()
        if not self._output.quiet:
            together = self._concurrency.overall()
            self._terminal.note(self._progress.statistics(together.mean, together.most))
        if self._first_error is None:
            return DONE
        failed = f"{counted(self._progress.failed, 'request')} failed"
        self._terminal.error(f"{failed}; the first: {self._first_error}", 'see the results of "type": "error"')
        return FAILED

    def _interrupted(self) -> str:
        done = counted(self._progress.done, "result")
        if self._batch.results is None:
            return f"interrupted after {done}; with --output FILE, the same command would go on after them"
        return f"interrupted; {done} of this run saved: run the same command again to go on"

    def _requests(self) -> Iterator[BatchRequest]:
        """Yield the requests of the file that are not answered yet; write the errors of those that are none."""
        group = self._opened.request.group
        lines = self._batch.file.lines() if self._batch.file is not None else iter(())
        while (packed := broadcast(group, lambda: self._next(lines))) is not None:
            line = Line.unpacked(*packed)
            try:
                request = line.request()
                self._check_id(request)
                wanted = self._batch_request(request)
            except LineError as error:
                self._fail(error.line, error.id, error.error)
            except Exception as error:
                if group is not None and not isinstance(error, TriforceError):
                    raise  # the other ranks may go on
                self._fail(request.line, request.id, typed_error(error))
            else:
                yield wanted

    def _next(self, lines: Iterator[Line]) -> tuple[int, int, str] | None:
        """Return the next line that is not answered yet, packed."""
        for line in lines:
            try:
                if line.request().id not in self._finished:
                    return line.packed()
            except LineError:
                return line.packed()
        return None

    def _check_id(self, request: LineRequest) -> None:
        """Raise LineError for an id that an earlier line has."""
        first = self._lines.setdefault(request.id, request.line)
        if first != request.line:
            error = PromptError(f"line {first} has the same id", "give each line another id")
            raise LineError(request.line, request.id, error)

    def _batch_request(self, line: LineRequest) -> BatchRequest:
        opened = opened_for(self._opened, line)
        prompt = opened.prompt(opened.encode(line.prompt), line.prompt[:LABEL])
        self._prepare(opened, prompt)
        if self._loaded.prompt_cache is not None:
            self._loaded.prompt_cache.label = short_label(prompt.name)
        settings = opened.settings
        config = replace(settings.generation, max_new_tokens=prompt.new_tokens)
        self._running[line.line] = _Running(line, opened, prompt, Meter(len(prompt.ids)))
        self._concurrency.enter(line.line)

        def text(events: Events) -> Events:
            return stream_text(events, text_layer(opened, prompt))

        return BatchRequest(line.line, prompt.ids, opened.sampling, config, settings.speculation, text)

    def _prepare(self, opened: ModelRequest, prompt: Prompt) -> None:
        """Measure and warn of what changes the answers, once, on the first prompt."""
        if self._is_prepared:
            return
        self._is_prepared = True
        settings, engine, display = opened.settings, self._loaded.engine, self._progress.display
        if settings.engine.quantize is not None:
            display.loading(f"comparing {settings.engine.quantize} with the original weights")
            self._agreement = opened.model.agreement(engine.model, prompt.ids)
            self._terminal.warn(quantized_warning(settings.engine.quantize, self._agreement))
        for warning in approximation_warnings(settings):
            self._terminal.warn(warning)
        if uses_copy(settings.speculation):
            display.loading("rounding a copy of the weights, to draft with")
            self._copy = engine.prepare(prompt.ids, settings.generation, settings.speculation)
        display.hide()

    def _observe(self, line: int, event: Event | Failed) -> None:
        running = self._running[line]
        if isinstance(event, Failed):
            self._leave(line)
            self._fail(line, running.line.id, event.error)
            return
        running.meter.observe(event)
        self._progress.event(line, event)
        if running.meter.finish_reason is not None:
            self._finish(running)

    def _finish(self, running: _Running) -> None:
        line, meter = running.line, running.meter
        facts = running.opened.summary_facts(running.prompt.new_tokens) | {"agreement": self._agreement}
        facts["batch_size"] = self._leave(line.line)
        if self._copy is not None:
            facts |= {"self_draft": self._copy.level, "self_agreement": self._copy.agreement}
        summary = asdict(replace(meter.summary(meter.finish_reason, **facts), settings={}))
        numbers: dict[str, Any] = {name: each for name, each in summary.items() if name not in _LEFT_OUT}
        texts = {"text": meter.text} | ({"thinking": "".join(meter.thoughts)} if self._output.show_thinking else {})
        self._write(json_line(type=RESULT, id=line.id, line=line.line, **texts, **rounded(numbers)))
        self._progress.finished(line.line, len(running.prompt.ids))

    def _leave(self, line: int) -> float:
        """Forget a sequence; return how many ran together with it, in the mean."""
        del self._running[line]
        return self._concurrency.leave(line).mean

    def _fail(self, line: int, id: Id | None, error: TriforceError) -> None:
        if isinstance(error, InternalError):
            self._terminal.trace(error)
        if self._first_error is None:
            self._first_error = f"line {line}: {error.message}"
        self._write(error_line(line, id, error.message, error.hint))
        self._progress.failed_at(line)
