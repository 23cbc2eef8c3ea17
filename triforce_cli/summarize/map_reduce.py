"""Map-reduce over a document that is longer than the context: notes on its parts, then an answer from the notes.

It loses information, so it runs only with --map-reduce, or where the user left the model to the program.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from offload.errors import PromptError, SettingsError, TriforceError
from offload.loading.tokenizers.tokenizer import EncodingProgress
from offload.loading.weights_digest import file_state
from offload.units import counted

from ..input.documents import Document
from ..input.excerpts import split
from ..output.format import about
from ..output.terminal import Terminal
from ..output.turns import Part, Section
from ..run.opened_request import OpenedRequest, Prompt
from ..run.plan import plan_run
from .answers import Passage, Steps
from .finished_parts import FinishedParts
from .instructions import AnswerStyle, Template, Templates

_OVERLAP = 1 / 20  # of a part, repeated at the beginning of the next
_SHARE = 4  # a note takes at most 1/4 of the context, so that several of them fit into one


class MapReduce:
    """Makes a prompt that fits the context from a document of any length: the model takes notes on each part."""

    def __init__(
        self, request: OpenedRequest, templates: Templates, finished: FinishedParts, terminal: Terminal, quiet: bool
    ) -> None:
        self._request, self._templates, self._finished = request, templates, finished
        self._terminal, self._quiet = terminal, quiet
        self._new_tokens = request.settings.generation.max_new_tokens
        self._note_tokens = min(self._new_tokens, request.context // _SHARE)
        # The parts that `reduce` is to begin with.
        self._checked: dict[tuple[Document, str], list[tuple[Part, Prompt]]] = {}

    def check(
        self, document: Document, note_taking: str, instruction: str, progress: EncodingProgress
    ) -> tuple[int, int]:
        """Return how many parts a document has, and how many of them an earlier run has not finished.

        Raises PromptError if the instructions leave no room for one.
        """
        self._room(self._templates.notes, instruction, self._new_tokens)
        parts = self._parts(document.text, note_taking, 1, document.name, progress)
        self._checked[document, note_taking] = parts
        return len(parts), sum(self._finished.find(prompt.ids) is None for _, prompt in parts)

    def predicted_time(self, parts: int, terminal: Terminal) -> str | None:
        """Return about how long `parts`, their notes and the answer take one after the other; None if no one knows."""
        context = self._request.context
        try:
            plan = plan_run(self._request.model, self._request.settings, context, terminal).plan
        except SettingsError:  # a GPU that no profile describes
            return None
        prompts, notes = parts + 1, parts * self._note_tokens
        while notes > context:  # the notes on the notes
            prompts, notes = prompts + notes // context, notes // context * self._note_tokens
        return about(prompts * (plan.ttft.seconds + self._note_tokens * plan.chosen.tbt.seconds))

    def reduce(
        self, document: Document, note_taking: str, instruction: str, tokens: int
    ) -> Generator[Sequence[Passage], list[str] | None, Prompt]:
        """Take notes on a document until they fit, and return the prompt that asks for the answer.

        `tokens`: of the prompt with the whole document. Yields the passages of each round, and is sent their texts.
        Raises TriforceError if the notes are empty or do not shrink.
        """
        parts, round = self._checked.pop((document, note_taking), None), 1
        parts = parts or self._parts(document.text, note_taking, round, document.name)
        while True:
            self._announce_finished(parts)
            notes = (yield [Passage(prompt, part) for part, prompt in parts]) or []
            text = "\n\n".join(note.strip() for note in notes if note.strip())
            if not text:
                raise TriforceError("the model wrote no notes on any part", "use another --model, or other sampling")
            ids = self._request.encode(self._templates.notes.filled(text, instruction))
            if len(ids) >= tokens:
                message = f"the notes on {counted(len(notes), 'part')} are not shorter than the text itself"
                raise PromptError(message, "use fewer --max-new-tokens or a smaller --length")
            if len(ids) + self._new_tokens <= self._request.context:
                return Prompt(ids, self._new_tokens)
            round, tokens = round + 1, len(ids)
            parts = self._parts(text, note_taking, round, document.name)

    def _announce_finished(self, parts: Sequence[tuple[Part, Prompt]]) -> None:
        """Print how many parts an earlier run has finished."""
        count = sum(self._finished.find(prompt.ids) is not None for _, prompt in parts)
        if count and not self._quiet:
            first = parts[0][0]
            which = f" of round {first.round}" if first.round > 1 else ""
            total = counted(len(parts), "part")
            self._terminal.note(f"{first.document}: {count} of {total}{which} reused from an earlier run")

    def _parts(
        self, text: str, note_taking: str, round: int, name: str, progress: EncodingProgress = lambda done, total: None
    ) -> list[tuple[Part, Prompt]]:
        template = self._templates.part if round == 1 else self._templates.notes
        room = self._room(template, note_taking, self._note_tokens)
        overlap = int(_OVERLAP * room) if round == 1 else 0
        texts = split(text, self._request.model.tokenizer.spans(text, progress), room, overlap)
        prompts: list[tuple[Part, Prompt]] = []
        for number, piece in enumerate(texts, 1):
            part = Part(number, len(texts), round, name)
            prompt = Prompt(self._request.encode(template.filled(piece, note_taking)), self._note_tokens, part.label)
            assert prompt.length <= self._request.context, "a part that does not fit"
            prompts.append((part, prompt))
            progress(len(text) * number // len(texts), len(text))
        return prompts

    def _room(self, template: Template, instruction: str, new_tokens: int) -> int:
        """Return the tokens of text that fit beside an instruction; encoded apart, a part may take a few more.

        Raises PromptError if there are too few.
        """
        used = len(self._request.encode(template.filled("x", instruction))) + new_tokens
        room = int(0.98 * (self._request.context - used)) - 16
        if room < max(64, self._request.context // (2 * _SHARE)):
            message = f"the instruction and the answer take {used:,} tokens, which leaves no room for parts in the "
            hint = "use a shorter instruction, fewer --max-new-tokens, or --model with a longer context"
            raise PromptError(f"{message}model's context of {self._request.context:,} tokens", hint)
        return room


def part_facts(request: OpenedRequest) -> dict[str, Any]:
    """Return everything that a part's notes depend on beside its prompt. A random seed is left out."""
    settings = request.settings
    seed = settings.generation.seed if "seed" in settings.values else None
    path = request.model.checkpoint.path
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    model = [(file.name, file_state(file)) for file in files if file.is_file()]
    resolved = request.resolved(settings.generation.max_new_tokens) | {"seed": seed}
    unimportant = {"profile", "threads", "memory", "host_memory", "resident_layers", "link_gb_s", "disk", "disk_limit"}
    unimportant |= {"cache", "cache_limit", "join_timeout"}
    return {"model": model, "settings": {name: value for name, value in resolved.items() if name not in unimportant}}


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to generate. `prompt` is None where the document is longer than the context."""

    section: Section
    document: Document
    ids: list[int]
    prompt: Prompt | None = None


def steps(task: Task, reading: MapReduce, style: AnswerStyle) -> Steps:
    """Return the steps of an answer: its prompt's text, for a long document after notes on its parts."""
    prompt = task.prompt or (yield from reading.reduce(*instructions(task, style), len(task.ids)))
    yield [Passage(prompt)]


def instructions(task: Task, style: AnswerStyle) -> tuple[Document, str, str]:
    """Return the document, the instruction for notes on its parts, and the instruction for the answer."""
    question = task.section.question
    return task.document, style.note_taking(question), style.instruction(question)
