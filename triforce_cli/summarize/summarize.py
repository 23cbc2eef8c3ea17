"""Documents and questions -> prompts, checked before anything is loaded, then answered over one loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.errors import PromptError
from offload.levels import forgets
from offload.system import default_home

from ..input.documents import Document
from ..input.excerpts import Range
from ..options.request import OutputOptions, Request
from ..output.renderers import StreamRenderer, tokenizing
from ..output.sections import Section, sections
from ..output.terminal import Terminal
from ..run.generate import TextGenerator, run_request
from ..run.model_request import ModelRequest, Prompt, open_request
from ..run.parallel import check_parallel
from .instructions import AnswerStyle
from .map_reduce import MapReduce, part_facts
from .resume import FinishedParts
from .steps import Answer, Job, Steps, generate_in_order
from .templates import Templates
from .together import AnswersTogether


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


@dataclass(frozen=True, slots=True)
class _Task:
    """One answer to generate. `prompt` is None where the document is longer than the context."""

    section: Section
    document: Document
    ids: list[int]
    prompt: Prompt | None = None


def run_summaries(
    summary: SummaryRequest, request: Request, terminal: Terminal, output: OutputOptions, renderer: StreamRenderer
) -> int:
    """Write the answers in order; return the exit code. Raises as `run_request`."""
    opened = open_request(request, terminal, output.quiet)
    documents = _documents(summary, opened, terminal, output.quiet)
    tasks = _tasks(summary, documents, opened, renderer)
    if request.extend_context:
        opened = opened.stretched([task.ids for task in tasks], terminal)
    tasks = [_with_prompt(task, opened, summary) for task in tasks]
    if output.verbose:
        opened.print_settings(opened.settings.generation.max_new_tokens, terminal)
    finished = FinishedParts(request.home or default_home(), part_facts(opened), terminal.warn, request.group)
    reading = MapReduce(opened, summary.templates, finished, terminal, output.quiet)
    longest = max(_length(task, opened, reading, summary.style) for task in tasks)

    count = None if any(task.prompt is None for task in tasks) else len(tasks)
    parallel = check_parallel(summary.parallel, opened, longest, count)
    answers = [Answer(task.section, _steps(task, reading, summary.style)) for task in tasks]

    def work(generator: TextGenerator) -> None:
        try:
            if parallel == 1:
                generate_in_order(answers, generator, finished, renderer)
            else:
                batch = AnswersTogether(answers, finished, renderer, renderer.for_batch())
                line = batch.generate(generator, parallel).summary_line()
                if not output.quiet:
                    terminal.note(line)
        except KeyboardInterrupt:
            if finished.any_used and not output.quiet:
                terminal.note("the finished parts are saved: run the same command again to resume after them")
            raise
        finished.clear()

    return run_request(opened, longest, terminal, output, renderer, work)


def _documents(summary: SummaryRequest, opened: ModelRequest, terminal: Terminal, quiet: bool) -> list[Document]:
    """Return the documents cut to the range; as one if they are summarized together."""
    found = []
    for document in summary.documents:
        text, note = summary.range.cut(document.text, opened.model.tokenizer.spans, document.name)
        if note and not quiet:
            terminal.note(note)
        found.append(Document(document.name, text))
    if not summary.together or len(found) == 1:
        return found
    whole = "\n\n".join(f"# {document.name}\n\n{document.text.strip()}" for document in found)
    return [Document(", ".join(document.name for document in found), whole)]


def _tasks(
    summary: SummaryRequest, documents: Sequence[Document], opened: ModelRequest, renderer: StreamRenderer
) -> list[_Task]:
    """Return a task for each question about each document."""
    questions = list(summary.questions) or [None]
    found = []
    for document, row in zip(documents, sections([each.name for each in documents], questions), strict=True):
        for section in row:
            instruction = summary.style.instruction(section.question)
            text = summary.templates.document.filled(document.text, instruction)
            ids = opened.encode(text, tokenizing(renderer))
            found.append(_Task(section, document, ids))
    return found


def _with_prompt(task: _Task, opened: ModelRequest, summary: SummaryRequest) -> _Task:
    """Return the task with its prompt, if it fits. Raises PromptError if it does not, without --map-reduce."""
    new = opened.settings.generation.max_new_tokens
    if forgets(opened.settings.speculation) or len(task.ids) + new <= opened.context:
        return replace(task, prompt=Prompt(task.ids, new, task.document.name))
    if not summary.map_reduce:
        raise PromptError(
            f"{task.document.name} takes {len(task.ids):,} tokens with the instruction, and the answer {new:,}; "
            f"the model's context has {opened.context:,}",
            "--map-reduce reads it in parts; --extend-context extends the context; "
            f"--from and --to select a part of it, such as --to {max(opened.context - new - 256, 1)}",
        )
    return task


def _length(task: _Task, opened: ModelRequest, reading: MapReduce, style: AnswerStyle) -> int:
    """Return the tokens that the caches must have room for. Raises PromptError if its parts do not fit either."""
    if task.prompt is not None:
        return task.prompt.length
    reading.check(*_texts(task, style))
    return opened.context  # as much as the notes may take


def _steps(task: _Task, reading: MapReduce, style: AnswerStyle) -> Steps:
    prompt = task.prompt or (yield from reading.reduce(*_texts(task, style)))
    yield [Job(prompt)]


def _texts(task: _Task, style: AnswerStyle) -> tuple[Document, str, str]:
    """Return the document, the instruction for notes on its parts, and the instruction for the answer."""
    question = task.section.question
    return task.document, style.note_taking(question), style.instruction(question)
