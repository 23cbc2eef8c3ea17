"""The requests of a batch over one loaded model: taken as others end, each result written as it comes."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from offload.errors import InternalError, TriforceError, typed_error
from offload.metrics import Meter, Summary
from offload.units import counted

from ..distributed.rank import broadcast
from ..options.command_request import OutputOptions
from ..output.batch_display import BatchDisplay
from ..output.format import rounded
from ..output.renderers import Renderer
from ..output.stdout_formats import Output, json_line
from ..output.terminal import Terminal
from ..run.batch_generator import BatchGenerator, BatchPrompt
from ..run.model_request import ModelRequest
from ..run.prompt_cache import LABEL
from ..run.text_generator import TextGenerator
from ..signals import DONE, FAILED
from .batch_files import RESULT, BatchFile, Line, PackedLine, ResultFile, error_line, opened_for
from .line_request import Id, LineError, LineRequest, repeated

Write = Callable[[str], None]
_LEFT_OUT = ("settings", "verify", "load_s")  # of a summary: the same for all, or never there


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A batch: the lines, where the results go (None: stdout), and how many run together, a number or "auto".

    Only the first rank has the files. `cluster` is the address of the Ray cluster that answers them, if one does.
    """

    file: BatchFile | None
    results: ResultFile | None
    parallel: int | str
    cluster: str | None = None

    def lines(self) -> Iterator[Line]:
        """Return the lines; none on the other ranks."""
        return iter(()) if self.file is None else self.file.lines()

    def writer(self, display: BatchDisplay) -> Write:
        return display.write if self.results is None else self.results.write


class BatchRun:
    """The requests of a batch over one loaded model."""

    def __init__(
        self,
        lines: Iterator[Line],
        write: Write,
        has_file: bool,
        opened: ModelRequest,
        generator: TextGenerator,
        finished: set[Id],
        terminal: Terminal,
        output: OutputOptions,
        display: BatchDisplay,
    ) -> None:
        """Prepare to answer `lines`, which the first rank has, but for those that are `finished`.

        `write` takes each result, as a line of JSON; `has_file` says whether that goes to a file.
        """
        self._source, self._write, self._has_file = lines, write, has_file
        self._opened, self._generator = opened, generator
        self._terminal, self._output, self._display = terminal, output, display
        self._lines: dict[Id, int] = {}  # by the ids that they have, of all requests so far
        self._finished = finished
        self._is_prepared = False
        self._first_error: str | None = None

    def run(self, parallel: int) -> int:
        """Run up to `parallel` requests at a time; return the exit code."""
        together = BatchGenerator(self._generator, parallel, self._display.end)
        try:
            together.run(self._prompts())
        except KeyboardInterrupt:
            end_interrupted(self._display, self._terminal, self._output, self._has_file)
            raise
        self._display.close()
        if not self._output.quiet:
            mean, most = together.concurrency.mean, together.concurrency.most
            self._terminal.note(self._display.statistics(f"{mean:.1f} sequences together, {most} at most"))
        return exit_code(self._display, self._first_error, self._terminal)

    def _prompts(self) -> Iterator[BatchPrompt]:
        """Yield the prompts of the file that are not answered yet; write the errors of lines that are none."""
        group = self._opened.request.group
        while (following := broadcast(group, self._next)) is not None:
            packed, first = following
            line = Line.unpacked(*packed)
            try:
                request = line.request()
                if first != line.number:
                    raise repeated(request, first)
                prompt = self._prompt(request)
            except LineError as error:
                self._fail(error.line, error.id, False, error.error)
            except Exception as error:
                if group is not None and not isinstance(error, TriforceError):
                    raise  # the other ranks may go on
                self._fail(request.line, request.id, False, typed_error(error))
            else:
                yield prompt

    def _next(self) -> tuple[PackedLine, int] | None:
        """Return the next line that is not answered yet, packed, and the first one that has its id."""
        for line in self._source:
            try:
                id = line.request().id
            except LineError:
                return line.packed(), line.number
            first = self._lines.setdefault(id, line.number)
            if first != line.number or id not in self._finished:
                return line.packed(), first
        return None

    def _prompt(self, line: LineRequest) -> BatchPrompt:
        opened = opened_for(self._opened, line)
        prompt = opened.prompt(opened.encode(line.prompt), line.prompt[:LABEL])
        output = _LineOutput(line, self._output.show_thinking)
        renderer = _LineRenderer(self._terminal, output, self._display, self._write)
        if not self._is_prepared:
            self._is_prepared = True  # even if it fails: that is the error of the first line alone
            self._generator.prepare(prompt, renderer)
            self._display.hide()
        failed = partial(self._fail, line.line, line.id, True)
        return BatchPrompt(prompt, renderer, "", lambda text: None, failed, opened)

    def _fail(self, line: int, id: Id | None, has_run: bool, error: TriforceError) -> None:
        if isinstance(error, InternalError):
            self._terminal.trace(error)
        if self._first_error is None:
            self._first_error = f"line {line}: {error.message}"
        self._write(error_line(line, id, error.message, error.hint))
        self._display.fail(has_run)


def end_interrupted(display: BatchDisplay, terminal: Terminal, output: OutputOptions, has_file: bool) -> None:
    """End the display after Ctrl-C, and tell how the same command goes on."""
    display.hide()
    terminal.after_ctrl_c()
    done = counted(display.results, "result")
    if not output.quiet and has_file:
        terminal.note(f"interrupted; {done} of this run saved: run the same command again to go on")
    elif not output.quiet:
        terminal.note(f"interrupted after {done}; with --output FILE, the same command would go on after them")


def exit_code(display: BatchDisplay, first_error: str | None, terminal: Terminal) -> int:
    """Return the exit code of a batch, and report how many requests have failed, if any."""
    if first_error is None:
        return DONE
    failed = f"{counted(display.failed, 'request')} failed"
    terminal.error(f"{failed}; the first: {first_error}", 'see the results of "type": "error"')
    return FAILED


class _LineOutput(Output):
    """The result of a line as one line of JSON, once all of it is there. An interrupted one has none."""

    def __init__(self, line: LineRequest, show_thinking: bool) -> None:
        self._line, self._show_thinking = line, show_thinking

    def end(self, summary: Summary, meter: Meter) -> str:
        if summary.finish_reason == "interrupted":  # the next run begins it anew
            return ""
        fields = asdict(replace(summary, settings={}))
        numbers: dict[str, Any] = {name: each for name, each in fields.items() if name not in _LEFT_OUT}
        texts = {"text": meter.text} | ({"thinking": "".join(meter.thoughts)} if self._show_thinking else {})
        return json_line(type=RESULT, id=self._line.id, line=self._line.line, **texts, **rounded(numbers))


class _LineRenderer(Renderer):
    """Writes the result of a line, and shows all that run on one display."""

    def __init__(self, terminal: Terminal, output: Output, display: BatchDisplay, write: Write) -> None:
        super().__init__(terminal, output, quiet=True, display=display)
        self._result = write

    def finish(self, summary: Summary) -> None:
        if text := self._output.end(summary, self._meter):
            self._result(text)

    interrupt = finish
