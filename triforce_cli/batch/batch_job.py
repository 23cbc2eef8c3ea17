"""Runs a batch: surveys its lines, plans for the longest, and answers them here or on a Ray cluster."""

from dataclasses import asdict, replace

from ..distributed.rank import broadcast
from ..options.command_request import OutputOptions, Request
from ..output.batch_display import BatchDisplay
from ..output.terminal import Terminal
from ..run.job import Job, Load
from ..run.model_request import open_request, stretch
from ..signals import DONE
from .batch_files import Survey, survey
from .batch_run import BatchOptions, BatchRun


def run_batch(
    batch: BatchOptions, request: Request, terminal: Terminal, output: OutputOptions, display: BatchDisplay
) -> int:
    """Answer all requests; return the exit code, FAILED if one of them has an error. Raises TriforceError."""
    opened = open_request(request, terminal, output.quiet)
    finished = batch.results.finished if batch.results is not None else set()
    alone = replace(opened, request=replace(request, group=None))  # rank 0 surveys, while the others wait for it
    found = Survey(**broadcast(request.group, lambda: asdict(survey(batch.file, alone, finished))))
    if found.answered and not output.quiet:
        have = f"requests {'has' if found.answered == 1 else 'have'} a result already"
        total = found.requests + found.answered
        terminal.note(f"{found.answered:,} of {total:,} {have}: not run again, even if a prompt has changed")
    if not found.requests:
        return DONE
    if request.extend_context:
        opened = replace(opened, model=stretch(opened.model, found.longest, terminal))
    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    if batch.cluster is not None and not request.dry_run:
        from .ray_batch import run_on_cluster

        return run_on_cluster(batch, opened, found, terminal, output, display)
    job = Job(opened, found.longest, terminal, output, display)
    own = job.parallel(batch.parallel, found.requests)
    parallel = broadcast(request.group, lambda: own)
    if job.is_offloaded and batch.parallel != 1 and found.requests > 1 and not output.quiet:
        terminal.note("keys and values, or experts, are offloaded: one sequence at a time")
    if request.dry_run and not output.quiet:
        terminal.note(f"the plan is that of the longest request; {parallel} run together")

    def work(load: Load) -> int:
        generator = load()
        display.hide()
        display.expect(found.requests)
        results = batch.writer(display), batch.results is not None
        run = BatchRun(batch.lines(), *results, opened, generator, finished, terminal, output, display)
        return run.run(parallel)

    return job.run(work)
