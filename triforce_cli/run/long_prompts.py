"""A prompt that is longer than the context: a longer model, a truncation that is said aloud, or an error.

Where a model was chosen, by a flag, the environment or a profile, nothing is left out unless --truncate asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offload.errors import PromptError
from offload.settings.method_sizes import forgets

from ..distributed.rank import broadcast
from ..input.documents import STDIN, PromptText, name_of
from ..input.excerpts import MIDDLE, START, Truncated, truncate
from ..options.command_request import Request
from ..output.format import duration
from ..output.plan_fields import Argument, repeated
from ..output.renderers import Renderer, tokenizing
from ..output.terminal import Terminal
from .model_request import ModelRequest, open_request
from .profile_plans import LongModel, cached_model, known_model

_LEAST_SHARE = 2  # of the context, for a truncated text: 1/2; otherwise it is the answer that is too long
_NOT_IN_PARTS = (None, "--raw", "--verify", "--truncate", "--session", "--context")  # summarize has none of them


def is_model_chosen(request: Request) -> bool:
    """Return whether the user has named the model, in whatever way, instead of leaving it to the program."""
    return "model" in request.settings.values


def room(opened: ModelRequest) -> int:
    """Return the tokens of a prompt that leave room for the answer; for one of unlimited length, for a quarter."""
    wanted = opened.settings.generation.max_new_tokens
    exact = "max_new_tokens" in opened.settings.values
    return opened.context - (wanted if exact else min(wanted, opened.context // 4))


def fits(opened: ModelRequest, tokens: int) -> bool:
    """Return whether a prompt of so many tokens has room in the context; on a cache that forgets, any has."""
    exact = "max_new_tokens" in opened.settings.values
    return forgets(opened.settings.speculation) or tokens <= (room(opened) if exact else opened.context - 1)


@dataclass(frozen=True, slots=True)
class Notices:
    """Says what is done with a text that is too long: on stderr, and a truncation with --json on stdout too."""

    terminal: Terminal
    renderer: Renderer
    quiet: bool

    def note(self, text: str) -> None:
        """Print a line, unless --quiet."""
        if not self.quiet:
            self.terminal.note(text)

    def truncated(self, cut: Truncated, why: str, dry_run: bool) -> None:
        """Say what is left of a document; `why`, where nobody asked for it, is said in spite of --quiet."""
        if not dry_run:
            self.renderer.truncated(cut.fields)
        text = f"{short(cut.name)}: {cut.kept}, are read"
        if why:
            self.renderer.warn(f"{text}: {why}")
        else:
            self.note(text)


def with_longer_model(opened: ModelRequest, tokens: int, what: str, notices: Notices) -> ModelRequest | None:
    """Return the request with a model of the hub's cache that has room for `tokens` of prompt and answer, said aloud.

    None where the user has chosen the model, and where there is no such model.
    """
    request = opened.request
    if is_model_chosen(request):
        return None
    usual = request.settings.engine.model
    found = broadcast(
        request.group, lambda: (own := cached_model(tokens, request.settings, notices.terminal)) and asdict(own)
    )
    longer = found and LongModel(**found)
    if longer is None:
        return None
    notices.note(
        f"{what} exceeds the context of {usual}, {opened.context:,} tokens: {longer.name} runs, which is in the hub's "
        f"cache; --model {usual} chooses the other"
    )
    engine = replace(request.settings.engine, model=longer.name)
    longer_request = replace(request, settings=replace(request.settings, engine=engine))
    return open_request(longer_request, notices.terminal, notices.quiet)


@dataclass(frozen=True, slots=True)
class Commands:
    """Command lines that do what this one cannot: the user's own words, changed."""

    request: Request
    sources: str  # the names of what was read
    question: str = ""

    def with_model(self, longer: LongModel) -> str:
        """Return the command with a model that has room for all."""
        return self._line(self.request.command, Argument("--model", (longer.name,)))

    def truncated(self, dropped: str) -> str:
        """Return the command that leaves a part out."""
        return self._line(self.request.command, Argument("--truncate", (dropped,)))

    def in_parts(self) -> str:
        """Return the command that reads all in parts."""
        if self.request.command == "summarize":
            return self._line("summarize", Argument("--map-reduce"))
        question = [Argument("--question", (self.question.strip(),))] if self.question else []
        parts = [Argument("--map-reduce")] if is_model_chosen(self.request) else []
        kept = [each for each in self.request.arguments if each.option not in _NOT_IN_PARTS]
        return self._piped(repeated("summarize", [*kept, *question], *parts))

    def _line(self, command: str, added: Argument) -> str:
        return self._piped(repeated(command, self.request.arguments, added))

    def _piped(self, line: str) -> str:
        return f"… | {line}" if name_of(STDIN) in self.sources.split(", ") else line


def longer_command(commands: Commands, tokens: int, terminal: Terminal) -> str:
    """Return `COMMAND` with a model that has room for `tokens` and how long it reads, in words; "" without one."""
    request = commands.request
    found = broadcast(request.group, lambda: (own := known_model(tokens, request.settings, terminal)) and asdict(own))
    longer = found and LongModel(**found)
    if longer is None:
        return ""
    return f"`{commands.with_model(longer)}` ({duration(longer.ttft_s)} to the first word on this machine, by the plan)"


def too_long(opened: ModelRequest, tokens: int) -> PromptError:
    """Return the error of a prompt of so many tokens, which does not fit the context."""
    try:
        opened.prompt([0] * tokens)
    except PromptError as error:
        return error
    raise AssertionError("the prompt fits")


def refusal(error: PromptError, commands: Commands, tokens: int, terminal: Terminal, others: str = "") -> PromptError:
    """Return the error of a prompt that is too long for a chosen model, with whole commands that would work.

    `others`: options that would work too.
    """
    others = others or ("--extend-context" if "--extend-context" in error.hint else "")
    reads_all = longer_command(commands, tokens, terminal)
    hints = [f"in parts: `{commands.in_parts()}`", f"without the start: `{commands.truncated(START)}`"]
    hints += [f"in one with another model: {reads_all}"] if reads_all else []
    hints += [f"or add {others}"] if others else []
    return PromptError(error.message, "\n".join(hints))


def fit_prompt(
    prompt: PromptText, opened: ModelRequest, ids: list[int], notices: Notices
) -> tuple[ModelRequest, list[int]]:
    """Return the request and the tokens of a prompt that fits: as it is, with a longer model, or truncated.

    Raises PromptError where a model was chosen and --truncate was not given.
    """
    request, new = opened.request, opened.settings.generation.max_new_tokens
    if fits(opened, len(ids)):
        return opened, ids
    commands = Commands(request, prompt.name, prompt.question)
    if request.truncate is None:
        longer = with_longer_model(opened, len(ids) + new, short(prompt.name), notices)
        if longer is not None:
            opened, ids = longer, longer.encode(prompt.text, tokenizing(notices.renderer))
            if fits(opened, len(ids)):
                return opened, ids
        elif is_model_chosen(request):
            raise refusal(too_long(opened, len(ids)), commands, len(ids) + new, notices.terminal)
    dropped = request.truncate or (MIDDLE if prompt.question else START)
    if room(opened) < opened.context // _LEAST_SHARE:
        most = opened.context // _LEAST_SHARE
        message = f"an answer of {new:,} tokens leaves too little of the context of {opened.context:,} for the text"
        raise PromptError(message, f"use --max-new-tokens {most} or fewer")
    whole = prompt.name, prompt.document
    cut, kept = truncated(opened, *whole, dropped, room(opened), lambda text: opened.encode(prompt.around(text)))
    why = "" if request.truncate else reason(opened, commands, len(ids) + new, notices.terminal)
    notices.truncated(cut, why, request.dry_run)
    return opened, kept


def truncated(
    opened: ModelRequest, name: str, document: str, dropped: str, most: int, encode: Callable[[str], Sequence[int]]
) -> tuple[Truncated, list[int]]:
    """Return a document cut to a prompt of up to `most` tokens, and the tokens of that prompt. Raises PromptError."""
    return truncate(name, document, opened.model.tokenizer.spans(document), dropped, most, encode)


def reason(opened: ModelRequest, commands: Commands, tokens: int, terminal: Terminal) -> str:
    """Return why a text is truncated that nobody asked to truncate, and the commands that read all of it."""
    model, reads_all = opened.settings.engine.model, longer_command(commands, tokens, terminal)
    why = f"no --model was chosen, and {model} has a context of {opened.context:,}; to read all: "
    return why + (f"{reads_all}, or in parts: " if reads_all else "") + f"`{commands.in_parts()}`"


def short(names: str) -> str:
    """Return the names of files without their folders."""
    return ", ".join(Path(name).name for name in names.split(", "))
