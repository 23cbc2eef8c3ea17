"""Texts that are longer than the context: what is left of one that is cut, and the commands that read all of it."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import PromptError
from offload.settings.method_sizes import forgets

from ..input.documents import STDIN, name_of
from ..input.excerpts import START, truncate
from ..output.format import about, size
from ..output.plan_fields import repeated
from ..output.renderers import Renderer
from ..output.terminal import Terminal
from .opened_request import OpenedRequest
from .profile_plans import known_model

_LEAST_SHARE = 2  # of the context, for the text: 1/2; with less, the answer is what is too long
_QUESTION = "Who tells this story?"


def room(opened: OpenedRequest) -> int:
    """Return the tokens of a prompt that leave room for the answer; for one of unlimited length, for a quarter."""
    wanted = opened.settings.generation.max_new_tokens
    exact = "max_new_tokens" in opened.settings.values
    return opened.context - (wanted if exact else min(wanted, opened.context // 4))


def fits(opened: OpenedRequest, tokens: int) -> bool:
    """Return whether a prompt of so many tokens has room in the context; on a cache that forgets, any has."""
    exact = "max_new_tokens" in opened.settings.values
    return forgets(opened.settings.speculation) or tokens <= (room(opened) if exact else opened.context - 1)


def check_answer(opened: OpenedRequest) -> None:
    """Raise PromptError for an answer that leaves a text too little of the context."""
    most, context = opened.context // _LEAST_SHARE, opened.context
    if room(opened) < context - most:
        new = opened.settings.generation.max_new_tokens
        message = f"an answer of {new:,} tokens leaves too little of the context of {context:,} for the text"
        raise PromptError(message, f"use --max-new-tokens {most} or fewer")


def short(names: str) -> str:
    """Return the names of files without their folders."""
    return ", ".join(Path(name).name for name in names.split(", "))


@dataclass(frozen=True, slots=True)
class LongText:
    """The text of `sources`, names of files with commas between, for a model whose context is too short for it."""

    opened: OpenedRequest
    sources: str
    terminal: Terminal
    renderer: Renderer
    quiet: bool

    @property
    def is_model_chosen(self) -> bool:
        """Return whether the user has named the model: then nothing is left out that --truncate does not name."""
        return "model" in self.opened.settings.values

    def note(self, text: str) -> None:
        """Print a line, unless --quiet."""
        if not self.quiet:
            self.terminal.note(text)

    def cut(
        self, name: str, text: str, dropped: str, most: int, encode: Callable[[str], Sequence[int]]
    ) -> tuple[str, list[int]]:
        """Return a document cut to a prompt of up to `most` tokens, and the prompt's tokens; say what is left.

        Where --truncate has not asked for it, that is a warning, in spite of --quiet. Raises PromptError.
        """
        request = self.opened.request
        left, ids = truncate(name, text, self.opened.model.tokenizer.spans(text), dropped, most, encode)
        if not request.dry_run:
            self.renderer.truncated(left.fields)
        said = f"{short(name)}: {left.kept}, are read"
        if request.truncate is not None:
            self.note(said)
        else:
            context = f"{self.opened.settings.engine.model} has a context of {self.opened.context:,}"
            self.renderer.warn(f"{said}: {context}; a question about all of it is answered: `{self.asking()}`")
        return left.text, ids

    def asking(self) -> str:
        """Return a command that asks a question, for which all of the text is read in parts."""
        stdin = name_of(STDIN)
        files = [word for name in self.sources.split(", ") if name != stdin for word in ("-f", name)]
        model = ["--model", self.opened.settings.engine.model] if self.is_model_chosen else []
        line = shlex.join(["triforce", "generate", *files, *model, _QUESTION])
        return f"… | {line}" if stdin in self.sources.split(", ") else line

    def in_one(self, tokens: int) -> str:
        """Return the command with a model that reads so many tokens at once and soon; "" where none is known."""
        found = known_model(tokens, self.opened.settings, self.terminal)
        if found is None:
            return ""
        costs = f"{size(found.download_bytes)} to fetch, {about(found.ttft_s)} to the first word"
        return f"in one with another model: `{self._line('--model', found.name)}` ({costs})"

    def refusal(self, tokens: int) -> PromptError:
        """Return the error of a prompt of so many tokens that is too long, with whole commands that would work."""
        try:
            self.opened.prompt([0] * tokens)
        except PromptError as error:
            hints = [f"a question, for which all is read in parts: `{self.asking()}`"]
            hints += [f"without the start: `{self._line('--truncate', START)}`"]
            hints += [self.in_one(tokens + self.opened.settings.generation.max_new_tokens)]
            hints += ["or add --extend-context"] if "--extend-context" in error.hint else []
            return PromptError(error.message, "\n".join(filter(None, hints)))
        raise AssertionError("the prompt fits")

    def _line(self, option: str, value: str) -> str:
        line = repeated(self.opened.request.command, self.opened.request.words, (option, value))
        return f"… | {line}" if name_of(STDIN) in self.sources.split(", ") else line
