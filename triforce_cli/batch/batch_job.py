"""Runs a batch: parses its lines, plans for the longest item, and answers them here or on a Ray cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.settings.method_sizes import forgets

from ..distributed.rank import broadcast
from ..options.request import OutputOptions, Request
from ..output.batch_display import BatchDisplay
from ..output.terminal import Terminal
from ..run.opened_request import OpenedRequest, open_request, stretch
from ..run.run import Run
from ..signals import DONE
from .batch_run import BatchRun, opened_for
from .items import BadLine, BatchItem, NumberedLine, parse_lines
from .ray_batch import run_on_cluster
from .result_file import ResultFile

_ENCODED = 4  # items that are tokenized to find the longest, unless they do not fit the context
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A batch: its lines, where the results go (None: stdout), and how many run together, a number or "auto".

    Only the first rank has lines and results. `name` is the file's; `cluster` is the address of the Ray cluster that
    answers them, if one does.
    """

    lines: Sequence[NumberedLine]
    name: str
    results: ResultFile | None
    parallel: int | str
    cluster: str | None = None


def run_batch(
    batch: BatchOptions, request: Request, terminal: Terminal, output: OutputOptions, display: BatchDisplay
) -> int:
    """Answer all items; return the exit code, FAILED if one of them has an error. Raises TriforceError."""
    finished = [] if batch.results is None else list(batch.results.finished)
    lines, finished = broadcast(request.group, lambda: (batch.lines, finished))
    items, answered = parse_lines(lines, set(finished), batch.name)
    if answered and not output.quiet:
        have = f"requests {'has' if answered == 1 else 'have'} a result already"
        total = len(items) + answered
        terminal.note(f"{answered:,} of {total:,} {have}: not run again, even if a prompt has changed")
    if not items:
        return DONE
    opened = open_request(request, terminal, output.quiet)
    longest = broadcast(request.group, lambda: longest_of(items, replace(opened, request=replace(request, group=None))))
    if request.extend_context:
        opened = replace(opened, model=stretch(opened.model, longest, terminal))
    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    write = display.write if batch.results is None else batch.results.write
    answers = BatchRun(items, write, batch.results is not None, opened, terminal, output, display)
    if batch.cluster is not None and not request.dry_run:
        return run_on_cluster(batch.cluster, answers, dict(lines), longest, batch.parallel)
    run = Run(opened, longest, terminal, output, display)
    own = run.parallel(batch.parallel, len(items))
    parallel = broadcast(request.group, lambda: own)
    if run.is_offloaded and batch.parallel != 1 and len(items) > 1 and not output.quiet:
        terminal.note("keys and values, or experts, are offloaded: one sequence at a time")
    if request.dry_run:
        if not output.quiet:
            terminal.note(f"the plan is that of the longest request; {parallel} run together")
        return run.print_plan()
    run.load()
    return answers.run(run, parallel)


def longest_of(items: Sequence[BatchItem | BadLine], opened: OpenedRequest) -> int:
    """Return the tokens of the longest sequence, prompt and answer.

    It is an estimate, from the bytes of all prompts and the tokens of the longest ones. One that does not fit the
    context counts only with --extend-context.
    """
    usual = opened.settings.generation.max_new_tokens

    def size(item: BatchItem) -> float:
        text = len(item.prompt.encode()) + len((item.system or "").encode())
        return text / _BYTES_A_TOKEN + item.options.get("max_new_tokens", usual)

    is_stretched = opened.request.extend_context and not forgets(opened.settings.speculation)
    lengths: list[int] = []
    for item in sorted((item for item in items if isinstance(item, BatchItem)), key=size, reverse=True):
        try:
            own = opened_for(opened, item)
            ids = own.encode(item.prompt)
            new = own.settings.generation.max_new_tokens
            lengths.append(len(ids) + new if is_stretched else own.prompt(ids).length)
        except Exception:  # of any kind: it is reported when the item's turn comes
            continue
        if len(lengths) == _ENCODED:
            break
    return max(lengths, default=opened.context)
