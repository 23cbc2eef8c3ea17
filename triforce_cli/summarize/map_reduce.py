"""Map-reduce over a document that is longer than the context: notes on its parts, then an answer from the notes.

It loses information, so it runs only with --map-reduce.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from offload.errors import PromptError, TriforceError
from offload.units import counted

from ..input.documents import Document
from ..input.excerpts import split
from ..output.sections import Part
from ..output.terminal import Terminal
from ..run.model_request import ModelRequest, Prompt
from .resume import FinishedParts
from .steps import Job
from .templates import Template, Templates

_OVERLAP = 1 / 20  # of a part, repeated at the beginning of the next
_SHARE = 4  # a note takes at most 1/4 of the context, so that several of them fit into one


class MapReduce:
    """Makes a prompt that fits the context from a document of any length: the model takes notes on each part."""

    def __init__(
        self, request: ModelRequest, templates: Templates, finished: FinishedParts, terminal: Terminal, quiet: bool
    ) -> None:
        self._request = request
        self._templates = templates
        self._finished = finished
        self._terminal = terminal
        self._quiet = quiet
        self._new_tokens = request.settings.generation.max_new_tokens
        self._note_tokens = min(self._new_tokens, request.context // _SHARE)

    def check(self, document: Document, note_taking: str, instruction: str) -> None:
        """Raise PromptError if the instructions leave no room for a part in the context."""
        self._parts(document.text, note_taking, 1, document.name)
        self._room(self._templates.notes, instruction, self._new_tokens)

    def reduce(
        self, document: Document, note_taking: str, instruction: str
    ) -> Generator[Sequence[Job], list[str], Prompt]:
        """Take notes until they fit, and return the prompt that asks for the answer.

        Yields the jobs of each round, and is sent their texts. Raises TriforceError if the notes are empty or do not
        shrink.
        """
        text, ids, round = document.text, self._encode_notes(document.text, instruction), 0
        while len(ids) + self._new_tokens > self._request.context:
            round, before = round + 1, len(ids)
            parts = self._parts(text, note_taking, round, document.name)
            self._announce_finished(parts)
            notes = yield [Job(prompt, part) for part, prompt in parts]
            text = "\n\n".join(note.strip() for note in notes if note.strip())
            if not text:
                raise TriforceError("the model wrote no notes on any part", "use another --model, or other sampling")
            ids = self._encode_notes(text, instruction)
            if len(ids) >= before:
                raise PromptError(
                    f"the notes on {counted(len(notes), 'part')} are not shorter than the text itself",
                    "use fewer --max-new-tokens or a smaller --length",
                )
        return Prompt(ids, self._new_tokens)

    def _encode_notes(self, text: str, instruction: str) -> list[int]:
        return self._request.encode(self._templates.notes.filled(text, instruction))

    def _announce_finished(self, parts: Sequence[tuple[Part, Prompt]]) -> None:
        """Print how many parts an earlier run has finished."""
        count = sum(self._finished.find(prompt.ids) is not None for _, prompt in parts)
        if count and not self._quiet:
            first = parts[0][0]
            which = f" of round {first.round}" if first.round > 1 else ""
            total = counted(len(parts), "part")
            self._terminal.note(f"{first.document}: {count} of {total}{which} reused from an earlier run")

    def _parts(self, text: str, note_taking: str, round: int, name: str) -> list[tuple[Part, Prompt]]:
        template = self._templates.part if round == 1 else self._templates.notes
        room = self._room(template, note_taking, self._note_tokens)
        overlap = int(_OVERLAP * room) if round == 1 else 0
        texts = split(text, self._request.model.tokenizer.spans(text), room, overlap)
        ids = [self._request.encode(template.filled(each, note_taking)) for each in texts]
        prompts = [Prompt(each, self._note_tokens) for each in ids]
        assert all(prompt.length <= self._request.context for prompt in prompts), "a part that does not fit"
        return [(Part(number, len(prompts), round, name), prompt) for number, prompt in enumerate(prompts, 1)]

    def _room(self, template: Template, instruction: str, new_tokens: int) -> int:
        """Return the tokens of text that fit beside an instruction; encoded apart, a part may take a few more.

        Raises PromptError if there are too few.
        """
        used = len(self._request.encode(template.filled("x", instruction))) + new_tokens
        room = int(0.98 * (self._request.context - used)) - 16
        if room < max(64, self._request.context // (2 * _SHARE)):
            raise PromptError(
                f"the instruction and the answer take {used:,} tokens, which leaves no room for parts in the model's "
                f"context of {self._request.context:,} tokens",
                "use a shorter instruction, fewer --max-new-tokens, or --model with a longer context",
            )
        return room


def part_facts(request: ModelRequest) -> dict[str, Any]:
    """Return everything that a part's notes depend on beside its prompt. A random seed is left out."""
    settings = request.settings
    seed = settings.generation.seed if "seed" in settings.values else None
    path = request.model.checkpoint.path
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    model = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files if file.is_file()]
    resolved = request.resolved(settings.generation.max_new_tokens) | {"seed": seed}
    unimportant = {"profile", "threads", "memory", "host_memory", "resident_layers", "link_gb_s", "disk", "disk_limit"}
    unimportant |= {"cache", "cache_limit", "join_timeout"}
    return {"model": model, "settings": {name: value for name, value in resolved.items() if name not in unimportant}}
