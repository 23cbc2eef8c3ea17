"""The prompts of a benchmark, and the further ones of their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from offload.errors import PromptError, SettingsError
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.units import counted

from .axes import Grouped
from .benchmark import BenchRequest
from .report import LADDER


class TextTooShort(PromptError):
    """A text has too few tokens for the prompts asked for. `tokens` is how many it has."""

    def __init__(self, tokens: int, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt's name and its tokens: as many as the longest context has.

    `batches` has the tokens of each sequence of the batches in which it is the first one, by the batch's size; `ending`
    is the end of its tokens that a shorter context keeps.
    """

    name: str
    ids: list[int]
    batches: Mapping[int, list[list[int]]] = field(default_factory=dict)
    ending: int = 0

    def packed(self) -> tuple[str, list[int], list[tuple[int, list[list[int]]]], int]:
        return self.name, self.ids, list(self.batches.items()), self.ending

    @classmethod
    def unpacked(
        cls, name: str, ids: list[int], batches: list[tuple[int, list[list[int]]]], ending: int
    ) -> BenchPrompt:
        return cls(name, ids, dict(batches), ending)

    def first(self, context: int | None) -> list[int]:
        """Return the tokens of the prompt with a context."""
        return self._cut(self.ids, context)

    def sequences(self, batch: int, context: int | None) -> list[list[int]]:
        """Return the prompts of a batch; of one sequence, this one."""
        return [self._cut(ids, context) for ids in self.batches.get(batch, [self.ids])]

    def _cut(self, ids: list[int], context: int | None) -> list[int]:
        if context is None or not self.ending:
            return ids[:context]
        return ids[: min(context, len(ids)) - self.ending] + ids[-self.ending :]


def open_prompts(asked: BenchRequest, tokenizer: Tokenizer, warn: Callable[[str], None]) -> Iterator[BenchPrompt]:
    """Yield the prompts of a benchmark. Raises PromptError for a text that is too short, SettingsError.

    Texts of a data set that are too short are left out, and named in a warning where prompts are missing for them.
    """
    if not asked.is_dataset:
        for name, text in asked.texts:
            yield from _of_text(asked, tokenizer, name, text, asked.excerpts)
        return
    found, short = 0, []  # tokens of the texts that are too short
    for name, text in asked.texts if found < asked.excerpts else ():
        try:
            yield from _of_text(asked, tokenizer, name, text, 1)
        except TextTooShort as error:
            short.append(error.tokens)
        else:
            found += 1
        if found == asked.excerpts:
            return
    if not found:
        raise _none_long_enough(asked, max(short, default=0))
    texts = f"the data set has {counted(len(asked.texts), 'text')}" if asked.excerpts > len(asked.texts) else ""
    if short:
        are = "1 text is" if len(short) == 1 else f"{len(short):,} texts are"
        texts += f"{' and ' if texts else ''}{are} too short{_for_a_context(asked)}"
    warn(f"{found} of the {counted(asked.excerpts, 'prompt')} asked for: {texts}")


def _none_long_enough(asked: BenchRequest, longest: int) -> PromptError:
    hint = "give a data set with longer texts"
    if asked.request.command == "bench":
        hint = f"use a smaller --context, or {hint}"
    message = f"no text of the data set is long enough{_for_a_context(asked)}: the longest has"
    return PromptError(f"{message} {counted(longest, 'token')}", hint)


def _for_a_context(asked: BenchRequest) -> str:
    return "" if asked.contexts is None else f" for a context of {counted(max(asked.contexts), 'token')}"


def _of_text(asked: BenchRequest, tokenizer: Tokenizer, name: str, text: str, excerpts: int) -> Iterator[BenchPrompt]:
    longest = None if asked.contexts is None else max(asked.contexts)
    if excerpts > 1 and longest is None:
        raise SettingsError("--prompts takes excerpts, and needs their length", "add --context, such as 4K")
    ending = asked.endings.get(name, "")
    end = tokenizer.encode(ending, special_tokens=False) if ending else []
    _check_ending(asked, name, len(end))
    whole = tokenizer.encode(text, special_tokens=True)
    room = longest - len(end) if longest is not None and end else longest  # as it was written, where nothing follows
    first = first_tokens(whole, room, _option(asked), len(end))  # raises if the text is shorter
    plain = tokenizer.encode(text, special_tokens=False)
    beginning = whole[: len(whole) - len(plain)]
    # Every excerpt, also one alone, has its share of the text for the further sequences of a batch.
    sizes = {size for size in (1, *asked.batches) if size > 1 or excerpts > 1 or asked.in_turn}
    places = {size: windows(beginning, plain, len(first), excerpts * size) for size in sizes}
    for number in range(excerpts):
        batches = {size: [ids + end for ids in all_[number * size :][:size]] for size, all_ in places.items()}
        ids = first + end if excerpts == 1 else batches.pop(1)[0]
        if asked.in_turn:  # smaller batches have the first sequences of the largest, of which batch 1 has all
            widest = batches[max(batches)]
            batches = {size: widest[: size if size > 1 else None] for size in batches}
        yield BenchPrompt(name if excerpts == 1 else f"{name} {number + 1}/{excerpts}", ids, batches, len(end))


def _check_ending(asked: BenchRequest, name: str, tokens: int) -> None:
    """Raise SettingsError for a context that has no room for the question."""
    least = min(asked.contexts or (tokens + 2,))
    if tokens and least < tokens + 2:
        raise SettingsError(
            f"{_option(asked)} {least:,} has no room for the question of {name}", f"use {tokens + 2:,} or more"
        )


def _option(asked: BenchRequest) -> str:
    return "--ladder" if asked.kind == LADDER else "--context"


def first_tokens(ids: list[int], count: int | None, option: str = "--context", more: int = 0) -> list[int]:
    """Return the first `count` tokens, or all. Raises TextTooShort if there are fewer.

    `option` asked for them, and for `more` tokens behind them.
    """
    if count is not None and count > len(ids):
        meant = f"; {count.hint}" if isinstance(count, Grouped) else ""
        raise TextTooShort(
            len(ids),
            f"the prompt has {counted(len(ids) + more, 'token')}, fewer than {option} {count + more:,}",
            f"give a longer text, or use {option} {len(ids) + more}{meant}",
        )
    return ids[:count]


def windows(beginning: list[int], ids: list[int], length: int, count: int) -> list[list[int]]:
    """Return `count` prompts of `length` tokens from places of a text that are far from each other.

    They begin with the model's own `beginning`, and go on at the text's start after its end. Raises TextTooShort if the
    text has fewer tokens than there are prompts.
    """
    if count > len(ids):
        raise TextTooShort(
            len(ids),
            f"a batch of {count:,} needs as many places to begin at, and the text has {len(ids):,} tokens",
            "give a longer text, or a smaller --batch",
        )
    starts = [len(ids) * number // count for number in range(count)]
    taken = length - len(beginning)
    turns = -(-(starts[-1] + taken) // len(ids))
    return [beginning + (ids * turns)[start : start + taken] for start in starts]
