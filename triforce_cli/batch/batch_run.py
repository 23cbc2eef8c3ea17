"""The items of a batch over one loaded model: taken as others end, each result written as it comes."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from offload.errors import InternalError, PromptError, TriforceError, typed_error
from offload.metrics import Summary
from offload.units import counted

from ..distributed.rank import broadcast
from ..options.declarations import AUTO
from ..options.request import OutputOptions
from ..output.batch_display import BatchDisplay
from ..output.format import rounded
from ..output.renderers import Renderer
from ..output.stdout_formats import Output, json_line
from ..output.terminal import Terminal
from ..run.batch_generator import BatchGenerator, BatchPrompt
from ..run.opened_request import OpenedRequest
from ..run.prompt_cache import LABEL
from ..run.run import Run
from ..signals import DONE, FAILED
from .items import BadLine, BatchItem, Id
from .result_file import RESULT, error_line

_LEFT_OUT = ("settings", "verify", "load_s")  # of a summary: the same for all, or never there


def opened_for(opened: OpenedRequest, item: BatchItem) -> OpenedRequest:
    """Return the command's request with the options of an item. Raises PromptError, SettingsError.

    Where neither the command nor the item gives a seed, each item gets its own: equal prompts have different answers.
    """
    request = opened.request
    system = request.system if item.system is None else item.system
    raw = request.raw if item.raw is None else item.raw
    think = request.think if item.think is None else item.think
    if raw and (system is not None or item.think not in (None, AUTO)):
        name = "think" if system is None else "system"
        raise PromptError(f"raw and {name} contradict each other", f"raw uses no chat template, which {name} needs")
    seed = partial(broadcast, request.group, partial(secrets.randbits, 32))
    return opened.overridden(item.options, seed, system=system, raw=raw, think=think)


class BatchRun:
    """The items of a batch: their results and errors, written as lines of JSON and counted."""

    def __init__(
        self,
        items: Sequence[BatchItem | BadLine],
        write: Callable[[str], None],
        has_file: bool,
        opened: OpenedRequest,
        terminal: Terminal,
        output: OutputOptions,
        display: BatchDisplay,
    ) -> None:
        """`write` takes each result, as a line of JSON; `has_file` says whether that goes to a file."""
        self.items, self.write, self._has_file = items, write, has_file
        self.opened, self.terminal, self.output, self.display = opened, terminal, output, display
        self._first_error: str | None = None

    def run(self, run: Run, parallel: int) -> int:
        """Run up to `parallel` items at a time; return the exit code."""
        self.display.hide()
        self.display.expect(len(self.items))
        together = BatchGenerator(run, parallel, self.display.end)
        try:
            together.run(self._prompts(run))
        except KeyboardInterrupt:
            self.interrupted()
            raise
        return self.ended(f"up to {counted(together.most, 'sequence')} together")

    def _prompts(self, run: Run) -> Iterator[BatchPrompt]:
        """Yield the prompts of the items; write the errors of bad lines, and of items that cannot run."""
        for item in self.items:
            if isinstance(item, BadLine):
                self.fail(item.line, item.id, False, item.error)
                continue
            try:
                prompt = self._prompt(item, run)
            except Exception as error:
                if self.opened.request.group is not None and not isinstance(error, TriforceError):
                    raise  # the other ranks may go on
                self.fail(item.line, item.id, False, typed_error(error))
            else:
                yield prompt

    def _prompt(self, item: BatchItem, run: Run) -> BatchPrompt:
        opened = opened_for(self.opened, item)
        prompt = opened.prompt(opened.encode(item.prompt), item.prompt[:LABEL])
        renderer = _LineRenderer(item, self)
        run.prepare(renderer)
        failed = partial(self.fail, item.line, item.id, True)
        return BatchPrompt(prompt, renderer, "", lambda text: None, failed, opened)

    def fail(self, line: int, id: Id | None, has_run: bool, error: TriforceError) -> None:
        """Write and count an error: of a sequence that has ended, or of an item that could not run."""
        if isinstance(error, InternalError):
            self.terminal.trace(error)
        if self._first_error is None:
            self._first_error = f"line {line}: {error.message}"
        self.write(error_line(line, id, error.message, error.hint))
        self.display.fail(has_run)

    def interrupted(self) -> None:
        """End the display after Ctrl-C, and print how the same command goes on."""
        self.display.hide()
        self.terminal.after_ctrl_c()
        done = counted(self.display.results, "result")
        if not self.output.quiet and self._has_file:
            self.terminal.note(f"interrupted; {done} of this run saved: run the same command again to go on")
        elif not self.output.quiet:
            self.terminal.note(f"interrupted after {done}; with --output FILE, the same command would go on after them")

    def ended(self, how: str) -> int:
        """End the display, print statistics and the first error, if any; return the exit code."""
        self.display.close()
        if not self.output.quiet:
            self.terminal.note(self.display.statistics(how))
        if self._first_error is None:
            return DONE
        failed = f"{counted(self.display.failed, 'request')} failed"
        self.terminal.error(f"{failed}; the first: {self._first_error}", 'see the results of "type": "error"')
        return FAILED


class _LineRenderer(Renderer):
    """Writes the result of an item as one line of JSON, once it is whole, and shows all that run on one display."""

    def __init__(self, item: BatchItem, batch: BatchRun) -> None:
        super().__init__(batch.terminal, Output(), quiet=True, display=batch.display)
        self._item, self._batch = item, batch

    def finish(self, summary: Summary) -> None:
        if summary.finish_reason == "interrupted":  # the next run begins it anew
            return
        fields = asdict(replace(summary, settings={}))
        numbers = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
        texts = {"text": self._meter.text}
        if self._batch.output.show_thinking:
            texts["thinking"] = "".join(self._meter.thoughts)
        self._batch.write(json_line(type=RESULT, id=self._item.id, line=self._item.line, **texts, **rounded(numbers)))

    interrupt = finish
