"""What `evaluate` is asked to run, and the items of it. Imports no torch."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.errors import PromptError, SettingsError
from offload.evaluation.tasks import TASKS
from offload.evaluation.tasks.task import Item, TextTooShort, enough, make_item
from offload.evaluation.tasks.words import prose
from offload.hardware.schema import did_you_mean
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.settings.methods import APPROXIMATIONS
from offload.short_repr import short_repr
from offload.units import parse_tokens

from ..bench.compared import EXACT, MODES, is_dense, parse_modes, recomputes
from ..options.command_request import Request
from ..run.openai_client import is_endpoint

DEFAULT_MODES = (EXACT, *APPROXIMATIONS)
CHATTY = 32  # further tokens for the words that an answer in a chat has around it
MAP_REDUCE = "map-reduce"  # in parts that fill the context, or with =N in smaller ones
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """A request, and what to evaluate: every task, with every length, depth and seed, by every mode.

    Args:
        text: in which things are hidden; None for sentences that are made here.
        depths: where in a text things are hidden, as shares of it, the deepest first.
        are_named: whether the user has named the modes; of others, those that cannot run are left out.
        is_chat: ask in the model's chat template, and not by what the text continues with.
        points: the file of finished runs.
    """

    request: Request
    tasks: tuple[str, ...]
    modes: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    seeds: int
    text: str | None = None
    are_named: bool = True
    is_chat: bool = False
    points: Path | None = None

    @property
    def local(self) -> tuple[str, ...]:
        """Return the modes that the model of the request runs itself, the exact one first."""
        return tuple(mode for mode in self.modes if not is_endpoint(mode) and not is_map_reduce(mode))


def is_map_reduce(mode: str) -> bool:
    """Return whether a mode reads a text in parts."""
    return mode.partition("=")[0] == MAP_REDUCE


def part_of(mode: str) -> int | None:
    """Return the tokens of a part and its answer; None for as many as the context has. Raises SettingsError."""
    size = mode.partition("=")[2]
    return parse_tokens(size) if size else None


def parse_tasks(names: str) -> tuple[str, ...]:
    """Return the tasks in a list with commas, each once. Raises SettingsError for unknown ones."""
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in found:
        if name not in TASKS:
            raise SettingsError(f"there is no task {name!r}", f"{did_you_mean(name, TASKS)}tasks: {', '.join(TASKS)}")
    return found


def parse_depths(text: str) -> tuple[float, ...]:
    """Return depths, the deepest first: so many evenly spaced ones, or those of a list of percentages.

    Raises SettingsError.
    """
    places = [re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", each) for each in text.split(",")]
    shares = {float(each[1]) / 100 for each in places if each}
    if all(places) and max(shares) <= 1:
        return tuple(sorted(shares, reverse=True))
    count = int(text) if re.fullmatch("[0-9]{1,3}", text.strip()) else 0
    if not 1 <= count <= 100:
        hint = "give how many, from 1 to 100, such as 5, or each as a percentage, such as 10%,50%,90%"
        raise SettingsError(f"--depths is {short_repr(text)}", hint)
    return tuple((index + 0.5) / count for index in reversed(range(count)))


def parse_evaluated(names: str) -> tuple[str, ...]:
    """Return the modes in a list with commas, each once. The exact one is first, unless all are endpoints.

    Raises SettingsError for unknown ones.
    """
    parts = list(dict.fromkeys(name.strip() for name in names.split(",")))
    own = [part for part in parts if not is_endpoint(part) and not is_map_reduce(part)]
    for mode in own:
        if recomputes(mode) or is_dense(mode):
            raise SettingsError(f"{mode} is a mode of bench --quality alone", "leave it out")
    for mode in filter(is_map_reduce, parts):
        part_of(mode)
    others = f", {MAP_REDUCE}, or the URL of an endpoint"
    local = parse_modes(",".join(own or [EXACT]), MODES, others) if not all(map(is_endpoint, parts)) else ()
    return (*local, *(part for part in parts if part not in own))


def ids_of(tokenizer: Tokenizer, item: Item, is_chat: bool) -> list[int]:
    """Return the tokens of an item's prompt, which end with the beginning of the answer."""
    if not is_chat:
        return tokenizer.encode(item.prompt)
    asked = tokenizer.chat(f"{item.text}\n\n{item.question}", None)
    return [*asked, *tokenizer.encode(item.start.strip(), special_tokens=False)]


def make_items(asked: EvaluateRequest, tokenizer: Tokenizer, show: Callable[[str], None]) -> Iterator[Item]:
    """Yield all items, in an order in which many begin as the last one, and show which is made. Raises PromptError."""
    longest = max(asked.lengths)
    sentences = enough(prose(), longest) if asked.text is None else _SENTENCE_END.split(asked.text.strip())

    def count(text: str) -> int:
        return len(tokenizer.chat(text, None) if asked.is_chat else tokenizer.encode(text))

    wanted = [
        (TASKS[name], length, depth, seed)
        for length in asked.lengths
        for name in asked.tasks
        for seed in range(asked.seeds)
        for depth in (asked.depths if TASKS[name].has_depth else [0.5])
    ]
    try:
        for index, each in enumerate(wanted):
            show(f"making item {index + 1:,} of {len(wanted):,}")
            yield make_item(*each, sentences, count)
    except TextTooShort as error:
        raise PromptError(str(error), "give a longer text, other --tasks, or another --context") from error
