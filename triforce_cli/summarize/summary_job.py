"""Documents and questions -> prompts, checked before anything is loaded, then answered over one loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.errors import PromptError
from offload.settings.method_sizes import forgets
from offload.system.machine import default_home
from offload.units import counted

from ..input.documents import Document
from ..input.excerpts import Range
from ..options.request import OutputOptions, Request
from ..output.renderers import Renderer, tokenizing
from ..output.terminal import Terminal
from ..output.turns import sections
from ..run.long_prompts import Commands, Notices, is_model_chosen, short, shorter_answer, truncated
from ..run.opened_request import OpenedRequest, Prompt, open_request
from ..run.parallel import check_parallel
from ..run.run import Run
from ..signals import DONE
from .answers import Answer, AnswersTogether, generate_in_order
from .finished_parts import FinishedParts
from .instructions import AnswerStyle, Templates
from .map_reduce import MapReduce, Task, instructions, part_facts, steps


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """Documents and questions about them. Without `questions`, each is summarized; `range` is cut out of each."""

    documents: Sequence[Document]
    questions: Sequence[str]
    style: AnswerStyle
    templates: Templates
    range: Range
    together: bool = False
    map_reduce: bool = False
    parallel: int | str = 1  # texts to generate at a time, or "auto"


def run_summaries(
    summary: SummaryRequest, request: Request, terminal: Terminal, output: OutputOptions, renderer: Renderer
) -> int:
    """Write the answers in order; return the exit code. Raises as `Run`."""
    notices = Notices(terminal, renderer, output.quiet)
    opened, tasks = _open(summary, request, notices)
    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    finished = FinishedParts(request.home or default_home(), part_facts(opened), terminal.warn, request.group)
    reading = MapReduce(opened, summary.templates, finished, terminal, output.quiet)
    long = [task for task in tasks if task.prompt is None]
    counts = [reading.check(*instructions(task, summary.style), tokenizing(renderer)) for task in long]
    parts, unfinished = (sum(pair) for pair in zip(*counts, strict=True)) if counts else (0, 0)
    if long and not output.quiet:
        time = reading.predicted_time(unfinished, terminal)
        count = f"read in {counted(parts, 'part')}" + ("" if time is None else f", in {time}")
        asked = summary.map_reduce
        notices.note(f"{_names(long, opened)}: {count}" if asked else _parts_note(long, count, opened, terminal))
    longest = max(opened.context if task.prompt is None else task.prompt.length for task in tasks)
    parallel = check_parallel(summary.parallel, opened, longest, None if long else len(tasks))
    answers = [Answer(task.section, steps(task, reading, summary.style)) for task in tasks]

    run = Run(opened, longest, terminal, output, renderer)
    if request.dry_run:
        return run.print_plan()
    run.load()
    try:
        if parallel == 1:
            generate_in_order(answers, run, finished, renderer, unfinished)
        else:
            batch = AnswersTogether(answers, finished, renderer, renderer.for_batch())
            line = batch.generate(run, parallel).summary_line()
            if not output.quiet:
                terminal.note(line)
    except KeyboardInterrupt:
        if finished.any_used and not output.quiet:
            terminal.note("the finished parts are saved: run the same command again to resume after them")
        raise
    finished.clear()
    return DONE


def _open(summary: SummaryRequest, request: Request, notices: Notices) -> tuple[OpenedRequest, list[Task]]:
    """Return the model, another with a longer context where that of the request was not chosen, and what to read."""
    opened = open_request(
        request.about([document.text for document in summary.documents]), notices.terminal, notices.quiet
    )
    tasks = _tasks(summary, opened, notices)
    if request.extend_context:
        opened = opened.stretched([task.ids for task in tasks], notices.terminal)
    elif not (summary.map_reduce or request.truncate or all(_fits(task, opened) for task in tasks)):
        longest = max(len(task.ids) for task in tasks) + opened.settings.generation.max_new_tokens
        longer = notices.with_longer_model(opened, longest, _names(tasks, opened))
        if longer is not None:
            opened, tasks = longer, _tasks(summary, longer, notices)
    return opened, [_with_prompt(task, opened, summary, notices) for task in tasks]


def _documents(summary: SummaryRequest, opened: OpenedRequest, notices: Notices) -> list[Document]:
    """Return the documents cut to the range; as one if they are summarized together."""
    documents = []
    for document in summary.documents:
        text, note = summary.range.cut(document.text, opened.model.tokenizer.spans, document.name)
        if note:
            notices.note(note)
        documents.append(Document(document.name, text))
    if not summary.together or len(documents) == 1:
        return documents
    whole = "\n\n".join(f"# {document.name}\n\n{document.text.strip()}" for document in documents)
    return [Document(", ".join(document.name for document in documents), whole)]


def _tasks(summary: SummaryRequest, opened: OpenedRequest, notices: Notices) -> list[Task]:
    """Return a task for each question about each document."""
    documents = _documents(summary, opened, notices)
    questions: list[str | None] = list(summary.questions) or [None]
    tasks = []
    for document, row in zip(documents, sections([document.name for document in documents], questions), strict=True):
        for section in row:
            text = summary.templates.document.filled(document.text, summary.style.instruction(section.question))
            ids = opened.encode(text, tokenizing(notices.renderer))
            tasks.append(Task(section, document, ids))
    return tasks


def _fits(task: Task, opened: OpenedRequest) -> bool:
    new = opened.settings.generation.max_new_tokens
    return forgets(opened.settings.speculation) or len(task.ids) + new <= opened.context


def _with_prompt(task: Task, opened: OpenedRequest, summary: SummaryRequest, notices: Notices) -> Task:
    """Return the task with its prompt, cut if that was asked for; without one where the document is read in parts.

    Raises PromptError for a document that is too long for a model that was chosen, without --map-reduce.
    """
    request, new, name = opened.request, opened.settings.generation.max_new_tokens, task.document.name
    if _fits(task, opened):
        return replace(task, prompt=Prompt(task.ids, new, name))
    if request.truncate is not None:
        instruction = summary.style.instruction(task.section.question)

        def encode(text: str) -> list[int]:
            return opened.encode(summary.templates.document.filled(text, instruction))

        most = opened.context - new
        cut, ids = truncated(opened, name, task.document.text, request.truncate, most, encode)
        notices.truncated(cut, "", request.dry_run)
        return replace(task, prompt=Prompt(ids, new, name))
    if summary.map_reduce or not is_model_chosen(request):
        return task
    error = PromptError(
        f"{name} takes {len(task.ids):,} tokens with the instruction, and the answer {new:,}; "
        f"the model's context has {opened.context:,}"
    )
    answer, others = shorter_answer(opened, len(task.ids)), "--extend-context"
    if not answer:
        others += f", or --from and --to for a piece of it, such as --to {max(opened.context - new - 256, 1)}"
    sources = ", ".join(document.name for document in summary.documents)
    raise Commands(request, notices.terminal, sources).refusal(error, len(task.ids) + new, others, answer)


def _names(tasks: Sequence[Task], opened: OpenedRequest) -> str:
    """Return the documents that exceed the context, with their tokens, for people."""
    long = {task.document.name: len(task.ids) for task in tasks if not _fits(task, opened)}
    return ", ".join(f"{short(name)} ({count:,} tokens)" for name, count in long.items())


def _parts_note(long: Sequence[Task], count: str, opened: OpenedRequest, terminal: Terminal) -> str:
    """Return why documents are read in parts, the `count` of these and their time, and the command that does not."""
    model = opened.settings.engine.model
    sources = ", ".join(dict.fromkeys(task.document.name for task in long))
    tokens = max(len(task.ids) for task in long) + opened.settings.generation.max_new_tokens
    in_one = Commands(opened.request, terminal, sources).longer(tokens)
    return (
        f"{_names(long, opened)}: no --model was chosen, and {model} has a context of {opened.context:,}; "
        f"{count}" + (f"; to read it in one: {in_one}" if in_one else "")
    )
