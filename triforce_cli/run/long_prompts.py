"""A prompt that is longer than the context: a longer model, a truncation that is said aloud, or an error.

Where a model was chosen, by a flag, the environment or a profile, nothing is left out unless --truncate asks for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offload.errors import PromptError
from offload.settings.method_sizes import forgets

from ..distributed.rank import broadcast
from ..input.documents import STDIN, PromptText, name_of
from ..input.excerpts import MIDDLE, START, Truncated, truncate
from ..options.request import Request
from ..output.format import duration
from ..output.plan_fields import repeated
from ..output.renderers import Renderer, tokenizing
from ..output.terminal import Terminal
from .opened_request import OpenedRequest, open_request
from .profile_plans import LongModel, cached_model, known_model

_LEAST_SHARE = 2  # of the context, for a truncated text: 1/2; otherwise it is the answer that is too long
# Options of generate and chat, with a value or without, that summarize does not have.
_NOT_IN_PARTS = (("--raw",), ("--verify",), ("--truncate", ""), ("--session", ""), ("--context", ""))


def is_model_chosen(request: Request) -> bool:
    """Return whether the user has named the model, in whatever way, instead of leaving it to the program."""
    return "model" in request.settings.values


def room(opened: OpenedRequest) -> int:
    """Return the tokens of a prompt that leave room for the answer; for one of unlimited length, for a quarter."""
    wanted = opened.settings.generation.max_new_tokens
    exact = "max_new_tokens" in opened.settings.values
    return opened.context - (wanted if exact else min(wanted, opened.context // 4))


def fits(opened: OpenedRequest, tokens: int) -> bool:
    """Return whether a prompt of so many tokens has room in the context; on a cache that forgets, any has."""
    exact = "max_new_tokens" in opened.settings.values
    return forgets(opened.settings.speculation) or tokens <= (room(opened) if exact else opened.context - 1)


def shorter_answer(opened: OpenedRequest, tokens: int) -> int:
    """Return how long the answer to so many tokens may be, if it is what is too long; 0 if the prompt is."""
    return max(opened.context - tokens, 0) if room(opened) < opened.context // _LEAST_SHARE else 0


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

    def with_longer_model(self, opened: OpenedRequest, tokens: int, what: str) -> OpenedRequest | None:
        """Return the request with a model of the hub's cache that has room for `tokens`, prompt and answer; say so.

        None where the user has chosen the model, and where there is no such model.
        """
        request = opened.request
        if is_model_chosen(request):
            return None
        usual = request.settings.engine.model
        longer = _found(request, lambda: cached_model(tokens, request.settings, self.terminal))
        if longer is None:
            return None
        self.note(
            f"{what} exceeds the context of {usual}, {opened.context:,} tokens: {longer.name} runs, which is in the "
            f"hub's cache; --model {usual} chooses the other"
        )
        engine = replace(request.settings.engine, model=longer.name)
        longer_request = replace(request, settings=replace(request.settings, engine=engine))
        return open_request(longer_request, self.terminal, self.quiet)


@dataclass(frozen=True, slots=True)
class Commands:
    """Command lines that do what this one cannot: the user's own words, changed."""

    request: Request
    terminal: Terminal
    sources: str  # the names of what was read
    question: str = ""

    def in_parts(self) -> str:
        """Return the command that reads all in parts; "" for --quote of several files, of which each is read alone."""
        if self.request.quote and len(self.sources.split(", ")) > 1:
            return ""
        if self.request.command == "summarize":
            return self._line("--map-reduce")
        asked = self.question.strip()
        question = [("--question", asked)] if asked else []
        parts = [("--map-reduce",)] if is_model_chosen(self.request) else []
        words = [word for word in self.request.words if not asked or (word != "--" and word.strip() != asked)]
        return self._piped(repeated("summarize", words, *question, *parts, without=_NOT_IN_PARTS))

    def longer(self, tokens: int) -> str:
        """Return `COMMAND` with a model that has room for `tokens` and how long it reads, in words; "" without one."""
        request = self.request
        longer = _found(request, lambda: known_model(tokens, request.settings, self.terminal))
        if longer is None:
            return ""
        time = f"{duration(longer.ttft_s)} to the first word on this machine, by the plan"
        return f"`{self._line('--model', longer.name)}` ({time})"

    def refusal(self, error: PromptError, tokens: int, others: str = "", answer: int = 0) -> PromptError:
        """Return the error of a prompt that is too long for a chosen model, with whole commands that would work.

        `others`: options that would work too; `answer`: what `shorter_answer` returns.
        """
        others = others or ("--extend-context" if "--extend-context" in error.hint else "")
        reads_all = self.longer(tokens)
        if answer:
            hints = [f"with a shorter answer: `{self._line('--max-new-tokens', str(answer))}`"]
        else:
            hints = [f"in parts: `{in_parts}`"] if (in_parts := self.in_parts()) else []
            hints += [f"without the start: `{self._line('--truncate', START)}`"]
        hints += [f"in one with another model: {reads_all}"] if reads_all else []
        hints += [f"or add {others}"] if others else []
        return PromptError(error.message, "\n".join(hints))

    def reason(self, opened: OpenedRequest, tokens: int) -> str:
        """Return why a text is truncated that nobody asked to truncate, and the commands that read all of it."""
        model, reads_all = opened.settings.engine.model, self.longer(tokens)
        why = f"no --model was chosen, and {model} has a context of {opened.context:,}; to read all: "
        in_parts = self.in_parts()
        ways = [reads_all, in_parts and (f"in parts: `{in_parts}`" if reads_all else f"`{in_parts}`")]
        return why + (", or ".join(filter(None, ways)) or "give one file at a time")

    def _line(self, option: str, *values: str) -> str:
        return self._piped(repeated(self.request.command, self.request.words, (option, *values)))

    def _piped(self, line: str) -> str:
        return f"… | {line}" if name_of(STDIN) in self.sources.split(", ") else line


def _found(request: Request, find: Callable[[], LongModel | None]) -> LongModel | None:
    """Return what rank 0 finds, on all ranks."""
    model = broadcast(request.group, lambda: (own := find()) and asdict(own))
    return model and LongModel(**model)


def too_long(opened: OpenedRequest, tokens: int) -> PromptError:
    """Return the error of a prompt of so many tokens, which does not fit the context."""
    try:
        opened.prompt([0] * tokens)
    except PromptError as error:
        return error
    raise AssertionError("the prompt fits")


def fit_prompt(
    prompt: PromptText, opened: OpenedRequest, ids: list[int], notices: Notices
) -> tuple[OpenedRequest, list[int]]:
    """Return the request and the tokens of a prompt that fits: as it is, with a longer model, or truncated.

    Raises PromptError where a model was chosen and --truncate was not given.
    """
    request, new = opened.request, opened.settings.generation.max_new_tokens
    if fits(opened, len(ids)):
        return opened, ids
    commands = Commands(request, notices.terminal, prompt.name, prompt.question)
    if request.truncate is None:
        longer = notices.with_longer_model(opened, len(ids) + new, short(prompt.name))
        if longer is not None:
            opened, ids = longer, longer.encode(prompt.text, tokenizing(notices.renderer))
            if fits(opened, len(ids)):
                return opened, ids
        elif is_model_chosen(request):
            answer = shorter_answer(opened, len(ids))
            raise commands.refusal(too_long(opened, len(ids)), len(ids) + new, answer=answer)
    dropped = request.truncate or (MIDDLE if prompt.question else START)
    if room(opened) < opened.context // _LEAST_SHARE:
        most = opened.context // _LEAST_SHARE
        message = f"an answer of {new:,} tokens leaves too little of the context of {opened.context:,} for the text"
        raise PromptError(message, f"use --max-new-tokens {most} or fewer")
    whole = prompt.name, prompt.document
    cut, kept = truncated(opened, *whole, dropped, room(opened), lambda text: opened.encode(prompt.around(text)))
    why = "" if request.truncate else commands.reason(opened, len(ids) + new)
    notices.truncated(cut, why, request.dry_run)
    return opened, kept


def truncated(
    opened: OpenedRequest, name: str, document: str, dropped: str, most: int, encode: Callable[[str], Sequence[int]]
) -> tuple[Truncated, list[int]]:
    """Return a document cut to a prompt of up to `most` tokens, and the tokens of that prompt. Raises PromptError."""
    return truncate(name, document, opened.model.tokenizer.spans(document), dropped, most, encode)


def short(names: str) -> str:
    """Return the names of files without their folders."""
    return ", ".join(Path(name).name for name in names.split(", "))
