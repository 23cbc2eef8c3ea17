"""Documents and questions -> prompts, checked before anything is loaded, then answered over one loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from offload.errors import PromptError
from offload.system import default_home

from ..input.documents import Document
from ..options.job import Job, Prompt, open_job, tell_settings
from ..options.request import Telling, Wish
from ..output.sections import Section, sections
from ..output.terminal import Terminal
from ..run.generate import Speaker, renderer_for, run_checked
from .instructions import Wanted
from .map_reduce import MapReduce, facts_of
from .order import Order
from .resume import KeptParts


@dataclass(frozen=True, slots=True)
class _Task:
    """One answer. No `prompt`: the document is longer than the context."""

    section: Section
    document: Document
    question: str | None
    ids: list[int]
    prompt: Prompt | None


def run_summaries(order: Order, wish: Wish, terminal: Terminal, output: Telling) -> int:
    """Everything in its order, written as it comes; the exit code. Raises as `run_checked`."""
    renderer = renderer_for(terminal, output)
    with closing(renderer):
        job = open_job(wish, terminal, output.quiet)
        documents = _documents(order, job, terminal, output.quiet)
        tasks = _tasks(order, documents, job)
        if wish.extend_context:
            job = job.stretched([task.ids for task in tasks], terminal)
        tasks = [_checked(task, job, order) for task in tasks]
        if output.verbose:
            tell_settings(job, wish.settings.generation.max_new_tokens, terminal)
        kept = KeptParts(wish.home or default_home(), facts_of(job), terminal.warn, wish.group)
        reading = MapReduce(job, order.templates, kept, terminal, output.quiet)
        longest = max(_length(task, job, reading, order.wanted) for task in tasks)

        def work(speaker: Speaker) -> None:
            try:
                for task in tasks:
                    renderer.section(task.section)
                    speaker.answer(
                        task.prompt or reading.reduce(*_reading(task, order.wanted), speaker, renderer), renderer
                    )
            except KeyboardInterrupt:
                if kept.any_used and not output.quiet:
                    terminal.note("finished parts are kept: the same command goes on from there")
                raise
            kept.clear()

        return run_checked(job, longest, terminal, output, renderer, work)


def _documents(order: Order, job: Job, terminal: Terminal, quiet: bool) -> list[Document]:
    """Cut to the range; in one if they belong together."""
    found = []
    for document in order.documents:
        text, said = order.range.cut(document.text, job.opened.tokenizer.spans, document.name)
        if said and not quiet:
            terminal.note(said)
        found.append(Document(document.name, text))
    if not order.together or len(found) == 1:
        return found
    whole = "\n\n".join(f"# {document.name}\n\n{document.text.strip()}" for document in found)
    return [Document(", ".join(document.name for document in found), whole)]


def _tasks(order: Order, documents: Sequence[Document], job: Job) -> list[_Task]:
    questions = list(order.questions) or [None]
    found = []
    for document, row in zip(documents, sections([each.name for each in documents], questions), strict=True):
        for section in row:
            instruction = order.wanted.instruction(section.question)
            ids = job.encode(order.templates.document.filled(document.text, instruction))
            found.append(_Task(section, document, section.question, ids, None))
    return found


def _checked(task: _Task, job: Job, order: Order) -> _Task:
    """With its prompt, if it fits. Raises PromptError with the ways out if it does not and may not be divided."""
    new = job.wish.settings.generation.max_new_tokens
    if len(task.ids) + new <= job.context:
        return _Task(task.section, task.document, task.question, task.ids, Prompt(task.ids, new, task.document.name))
    if not order.map_reduce:
        raise PromptError(
            f"{task.document.name} takes {len(task.ids):,} tokens with the instruction, and the answer {new:,}; "
            f"the model's context has {job.context:,}",
            "--map-reduce reads it part by part; --extend-context stretches the context; "
            f"--from and --to take a piece, such as --to {max(job.context - new - 256, 1)}",
        )
    return task


def _length(task: _Task, job: Job, reading: MapReduce, wanted: Wanted) -> int:
    """Tokens that the caches must hold for a task. Raises PromptError if it cannot be divided."""
    if task.prompt is not None:
        return task.prompt.length
    reading.check(*_reading(task, wanted))
    return job.context  # as much as the notes may take


def _reading(task: _Task, wanted: Wanted) -> tuple[str, str, str]:
    """The document, what is to be noted of its parts, and what is asked in the end."""
    return task.document.text, wanted.note_taking(task.question), wanted.instruction(task.question)
