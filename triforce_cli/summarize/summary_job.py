"""Documents and questions -> prompts, checked before anything is loaded, then answered over one loaded model.

A document that exceeds the context is read in parts, unless it is to be cut, or there is no question about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from offload.settings.constraint import JSON_SCHEMA
from offload.system.machine import default_home
from offload.units import counted

from ..input.documents import Document, PromptText
from ..input.excerpts import START, Range
from ..options.request import OutputOptions, Request
from ..output.renderers import Renderer, tokenizing
from ..output.terminal import Terminal
from ..output.turns import Section, sections
from ..run.long_prompts import LongText, check_answer, fits, room, short
from ..run.opened_request import OpenedRequest, open_request
from ..run.parallel import check_parallel
from ..run.prompt_cache import LABEL
from ..run.run import Run
from ..signals import DONE
from .answers import Answer, AnswersInOrder, AnswersTogether
from .finished_parts import FinishedParts
from .instructions import AnswerStyle, Joined, Templates, load_templates
from .map_reduce import MapReduce, Task, part_facts


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """Documents and questions about them. Without `questions`, each is summarized; `range` is cut out of each."""

    documents: Sequence[Document]
    questions: Sequence[str]
    style: AnswerStyle
    templates: Templates
    range: Range = field(default_factory=Range)
    together: bool = False
    parallel: int | str = 1  # texts to generate at a time, or "auto"


def run_generation(
    text: PromptText, request: Request, terminal: Terminal, output: OutputOptions, renderer: Renderer
) -> int:
    """Generate from one prompt, writing as it comes; return the exit code. Raises as `Run`."""
    templates = replace(load_templates(), document=Joined())
    document = Document(text.name, text.document)
    summary = SummaryRequest([document], [text.question], AnswerStyle(verbatim=True), templates)
    return run_summaries(summary, request, terminal, output, renderer, text.parts)


def run_summaries(
    summary: SummaryRequest,
    request: Request,
    terminal: Terminal,
    output: OutputOptions,
    renderer: Renderer,
    files: Sequence[tuple[str, int]] = (),
) -> int:
    """Write the answers in order; return the exit code. Raises as `Run`.

    `files`: the names of the files that a document was joined of, and where each begins in it.
    """
    form = request.settings.values.get("constraint")
    schema = form.text if form is not None and form.kind == JSON_SCHEMA else None
    summary = replace(summary, style=replace(summary.style, schema=schema, quotes=request.quote))
    request = request.about([document.text for document in summary.documents], files)
    opened = open_request(request, terminal, output.quiet)
    tasks = _tasks(summary, opened, terminal, renderer)
    if request.extend_context:
        opened = opened.stretched([task.ids for task in tasks], terminal)
    names = ", ".join(document.name for document in summary.documents)
    text = LongText(opened, names, terminal, renderer, output.quiet)
    finished = FinishedParts(request.home or default_home(), part_facts(opened), terminal.warn, request.group)
    reading = MapReduce(opened, summary.templates, summary.style, finished, text.note)
    tasks = [_fitted(task, text, reading, summary) for task in tasks]
    prompts = [task.prompt for task in tasks if task.prompt is not None]
    new_tokens = prompts[0].new_tokens if prompts else opened.settings.generation.max_new_tokens
    opened.print_settings(new_tokens, terminal, output.verbose)
    long = [task for task in tasks if task.parts]
    unfinished = sum(reading.unfinished(task.parts) for task in long)
    if long:
        text.note(_parts_note(long, text, reading.predicted_time(unfinished, terminal)))
    longest = opened.context if long else max(prompt.length for prompt in prompts)
    parallel = check_parallel(summary.parallel, opened, longest, None if long else len(tasks))
    answers = [Answer(task.section, reading.steps(task)) for task in tasks]
    run = Run(opened, longest, terminal, output, renderer)
    if request.dry_run:
        return run.print_plan()
    run.load()
    try:
        if parallel == 1:
            begin = _no_section if summary.style.verbatim else renderer.section
            AnswersInOrder(run, finished, renderer, unfinished).generate(answers, begin, text.note)
        else:
            batch = AnswersTogether(answers, finished, renderer, renderer.for_batch())
            text.note(batch.generate(run, parallel).summary_line())
    except KeyboardInterrupt:
        if finished.any_used:
            text.note("the finished parts are saved: run the same command again to resume after them")
        raise
    finished.clear()
    return DONE


def _tasks(summary: SummaryRequest, opened: OpenedRequest, terminal: Terminal, renderer: Renderer) -> list[Task]:
    """Return a task for each question about each document."""
    documents = _documents(summary, opened, terminal)
    questions: list[str | None] = list(summary.questions) or [None]
    tasks = []
    for document, row in zip(documents, sections([each.name for each in documents], questions), strict=True):
        for section in row:
            text = summary.templates.document.filled(document.text, summary.style.instruction(section.question))
            tasks.append(Task(section, document, opened.encode(text, tokenizing(renderer))))
    return tasks


def _no_section(section: Section) -> None:
    """Begin the only answer of `generate`."""


def _documents(summary: SummaryRequest, opened: OpenedRequest, terminal: Terminal) -> list[Document]:
    """Return the documents cut to the range; as one if they are summarized together."""
    documents = []
    for document in summary.documents:
        text, note = summary.range.cut(document.text, opened.model.tokenizer.spans, document.name)
        if note:
            terminal.note(note)
        documents.append(Document(document.name, text))
    if not summary.together or len(documents) == 1:
        return documents
    whole = "\n\n".join(f"# {document.name}\n\n{document.text.strip()}" for document in documents)
    return [Document(", ".join(document.name for document in documents), whole)]


def _fitted(task: Task, text: LongText, reading: MapReduce, summary: SummaryRequest) -> Task:
    """Return the task with its prompt, perhaps a cut one, or with the parts in which the document is read.

    Raises PromptError for a prompt without a question that is too long for a model that was chosen.
    """
    opened, document = text.opened, task.document
    ids, instruction = task.ids, summary.style.instruction(task.section.question)
    if not fits(opened, len(ids)):
        check_answer(opened)
        dropped = opened.request.truncate
        if dropped is None and instruction:
            return reading.divided(task, tokenizing(text.renderer))
        if dropped is None and text.is_model_chosen:
            raise text.refusal(len(ids))

        def encode(part: str) -> list[int]:
            return opened.encode(summary.templates.document.filled(part, instruction))

        _, ids = text.cut(document.name, document.text, dropped or START, room(opened), encode)
    name = document.text[:LABEL] if summary.style.verbatim else document.name
    return replace(task, prompt=opened.prompt(ids, name))


def _parts_note(long: Sequence[Task], text: LongText, time: str) -> str:
    """Return how many parts documents are read in, their predicted time, and what reads them otherwise."""
    lengths = {short(task.document.name): len(task.ids) for task in long}
    names = ", ".join(f"{name} ({count:,} tokens)" for name, count in lengths.items())
    opened = text.opened
    in_one = text.in_one(max(lengths.values()) + opened.settings.generation.max_new_tokens)
    parts = counted(sum(len(task.parts) for task in long), "part")
    return (
        f"{names}: read in {parts}{time and f', in {time}'}, because the context of "
        f"{opened.settings.engine.model} has {opened.context:,}; --truncate middle reads both ends alone"
        + (f"; {in_one}" if in_one else "")
    )
