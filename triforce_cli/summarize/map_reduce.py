"""A document that is longer than the context: notes on its parts, then an answer from the notes.

The only lossy way to read that there is, and never taken unasked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offload.errors import PromptError, TriforceError
from offload.units import counted

from ..input.excerpts import split
from ..options.job import Job, Prompt
from ..output.renderers import StreamRenderer
from ..output.sections import Part
from ..output.terminal import Terminal
from ..run.generate import Speaker
from .resume import KeptParts
from .templates import Template, Templates

_OVERLAP = 1 / 20  # of a part, that the next one begins with
_SHARE = 4  # a note takes at most 1/4 of the context, so that several of them fit into one


class MapReduce:
    """Turns a document of any length into a prompt that fits, by way of the model itself."""

    def __init__(self, job: Job, templates: Templates, kept: KeptParts, terminal: Terminal, quiet: bool) -> None:
        self._job = job
        self._templates = templates
        self._kept = kept
        self._terminal = terminal
        self._quiet = quiet
        self._notes = min(job.wish.settings.generation.max_new_tokens, job.context // _SHARE)

    def check(self, document: str, note_taking: str, instruction: str) -> None:
        """Raises PromptError if not even the instructions leave room in the context."""
        self._parts(document, note_taking, 1)
        self._room(self._templates.notes, instruction, self._new_tokens)

    def reduce(
        self, document: str, note_taking: str, instruction: str, speaker: Speaker, renderer: StreamRenderer
    ) -> Prompt:
        """The prompt that asks for the answer, once notes are taken. Raises TriforceError if they do not shrink."""
        text, ids, round = document, self._ask(document, instruction), 0
        while len(ids) + self._new_tokens > self._job.context:
            round, before = round + 1, len(ids)
            notes = [
                self._note(part, prompt, speaker, renderer) for part, prompt in self._told(text, note_taking, round)
            ]
            text = "\n\n".join(note.strip() for note in notes if note.strip())
            if not text:
                raise TriforceError("the model has noted nothing on any part", "use another --model, or other sampling")
            ids = self._ask(text, instruction)
            if len(ids) >= before:
                raise PromptError(
                    f"the notes on {counted(len(notes), 'part')} are not shorter than what they were taken from",
                    "use fewer --max-new-tokens or a smaller --length",
                )
        return Prompt(ids, self._new_tokens)

    @property
    def _new_tokens(self) -> int:
        return self._job.wish.settings.generation.max_new_tokens

    def _ask(self, text: str, instruction: str) -> list[int]:
        return self._job.encode(self._templates.notes.filled(text, instruction))

    def _told(self, text: str, note_taking: str, round: int) -> Iterator[tuple[Part, Prompt]]:
        """The parts of a round, those that an earlier run has finished announced."""
        parts = self._parts(text, note_taking, round)
        known = sum(self._kept.find(prompt.ids) is not None for _, prompt in parts)
        if known and not self._quiet:
            which = f" of round {round}" if round > 1 else ""
            self._terminal.note(f"{known} of {counted(len(parts), 'part')}{which} taken over from an earlier run")
        yield from parts

    def _parts(self, text: str, note_taking: str, round: int) -> list[tuple[Part, Prompt]]:
        template = self._templates.part if round == 1 else self._templates.notes
        room = self._room(template, note_taking, self._notes)
        overlap = int(_OVERLAP * room) if round == 1 else 0
        texts = split(text, self._job.opened.tokenizer.spans(text), room, overlap)
        prompts = [Prompt(self._job.encode(template.filled(each, note_taking)), self._notes) for each in texts]
        assert all(prompt.length <= self._job.context for prompt in prompts), "a part that does not fit"
        return [(Part(number, len(prompts), round), prompt) for number, prompt in enumerate(prompts, 1)]

    def _room(self, template: Template, instruction: str, new_tokens: int) -> int:
        """Tokens of text that fit beside an instruction; cut out of its text, a part may take a few more."""
        used = len(self._job.encode(template.filled("x", instruction))) + new_tokens
        room = int(0.98 * (self._job.context - used)) - 16
        if room < max(64, self._job.context // (2 * _SHARE)):
            raise PromptError(
                f"the instruction and the answer take {used:,} tokens, which leaves no room for parts in the model's "
                f"context of {self._job.context:,} tokens",
                "use a shorter instruction, fewer --max-new-tokens, or --model with a longer context",
            )
        return room

    def _note(self, part: Part, prompt: Prompt, speaker: Speaker, renderer: StreamRenderer) -> str:
        text = self._kept.find(prompt.ids)
        if text is not None:
            renderer.taken_over(part, text)
            return text
        text = speaker.answer(prompt, renderer.for_part(part), part.label)
        self._kept.keep(prompt.ids, text)
        return text


def facts_of(job: Job) -> dict[str, Any]:
    """All that a part's text depends on, beside its prompt. A seed that nobody chose does not count."""
    settings = job.wish.settings
    seed = settings.generation.seed if "seed" in settings.values else None
    path = job.opened.checkpoint.path
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    model = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files if file.is_file()]
    resolved = job.resolved(settings.generation.max_new_tokens) | {"seed": seed}
    unimportant = {"profile", "threads", "memory", "host_memory", "resident_layers", "link_gb_s"}
    unimportant |= {"cache", "cache_limit", "join_timeout"}
    return {"model": model, "settings": {name: value for name, value in resolved.items() if name not in unimportant}}
