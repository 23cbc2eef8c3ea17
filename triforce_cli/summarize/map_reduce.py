"""Map-reduce over a document that is longer than the context: notes on its parts, then an answer from the notes.

It loses information: a note says that it runs, and --truncate or --extend-context replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to generate: to a `prompt`, or after notes on the `parts` of a document that exceeds the context."""

    section: Section
    document: Document
    ids: list[int]
    prompt: Prompt | None = None
    parts: Sequence[tuple[Part, Prompt]] = ()


class MapReduce:
    """Makes a prompt that fits the context from a document of any length: the model takes notes on each part."""

    def __init__(
        self,
        request: OpenedRequest,
        templates: Templates,
        style: AnswerStyle,
        finished: FinishedParts,
        note: Callable[[str], None],
    ) -> None:
        self._request, self._templates, self._style = request, templates, style
        self._finished, self._note = finished, note
        self._new_tokens = request.settings.generation.max_new_tokens
        self._note_tokens = min(self._new_tokens, request.context // _SHARE)

    def divided(self, task: Task, progress: EncodingProgress) -> Task:
        """Return the task with the parts of its document. Raises PromptError if the instructions leave no room."""
        self._room(self._templates.notes, self._style.instruction(task.section.question), self._new_tokens)
        return replace(task, parts=self._parts(task.document.text, task, 1, progress))

    def unfinished(self, parts: Sequence[tuple[Part, Prompt]]) -> int:
        """Return how many parts no earlier run has finished."""
        return sum(self._finished.find(prompt.ids) is None for _, prompt in parts)

    def predicted_time(self, parts: int, terminal: Terminal) -> str:
        """Return about how long `parts`, their notes and the answer take one after the other; "" if that is unknown."""
        context = self._request.context
        try:
            plan = plan_run(self._request.model, self._request.settings, context, terminal).plan
        except SettingsError:  # a GPU that no profile describes
            return ""
        prompts, notes = parts + 1, parts * self._note_tokens
        while notes > context:  # the notes on the notes
            prompts, notes = prompts + notes // context, notes // context * self._note_tokens
        return about(prompts * (plan.ttft.seconds + self._note_tokens * plan.chosen.tbt.seconds))

    def steps(self, task: Task) -> Steps:
        """Return the steps of an answer: its prompt's text, for a long document after notes on its parts.

        Notes are taken until they fit. Raises TriforceError if they are empty or do not shrink.
        """
        if task.prompt is not None:
            yield [Passage(task.prompt)]
            return
        instruction, tokens, round = self._style.instruction(task.section.question), len(task.ids), 1
        parts = task.parts
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
                break
            round, tokens = round + 1, len(ids)
            parts = self._parts(text, task, round)
        yield [Passage(Prompt(ids, self._new_tokens))]

    def _announce_finished(self, parts: Sequence[tuple[Part, Prompt]]) -> None:
        """Print how many parts an earlier run has finished."""
        count = len(parts) - self.unfinished(parts)
        if count:
            first = parts[0][0]
            which = f" of round {first.round}" if first.round > 1 else ""
            total = counted(len(parts), "part")
            self._note(f"{first.document}: {count} of {total}{which} reused from an earlier run")

    def _parts(
        self, text: str, task: Task, round: int, progress: EncodingProgress = lambda done, total: None
    ) -> list[tuple[Part, Prompt]]:
        note_taking = self._style.note_taking(task.section.question)
        template = self._templates.part if round == 1 else self._templates.notes
        room = self._room(template, note_taking, self._note_tokens)
        overlap = int(_OVERLAP * room) if round == 1 else 0
        texts = split(text, self._request.model.tokenizer.spans(text, progress), room, overlap)
        prompts: list[tuple[Part, Prompt]] = []
        for number, piece in enumerate(texts, 1):
            part = Part(number, len(texts), round, task.document.name)
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
