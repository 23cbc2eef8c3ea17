"""Surveys a batch before it runs: how many requests there are, and how long the longest one is. Nothing is kept."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from offload.errors import PromptError
from offload.settings.method_sizes import forgets

from ..distributed.rank import broadcast
from ..options.declarations import AUTO
from ..run.model_request import ModelRequest
from .batch_files import BatchFile, Line
from .line_request import EXAMPLE, Id, LineError, LineRequest


def opened_for(opened: ModelRequest, line: LineRequest) -> ModelRequest:
    """Return the command's request with the options of a line. Raises PromptError, SettingsError.

    Where neither the command nor the line gives a seed, each line gets its own: equal prompts have different answers.
    """
    request = opened.request
    system = request.system if line.system is None else line.system
    raw = request.raw if line.raw is None else line.raw
    if raw and system is not None:
        raise PromptError("raw and system contradict each other", "raw uses no chat template, which system needs")
    think = request.think if line.think is None else line.think
    if raw and line.think not in (None, AUTO):
        raise PromptError("raw and think contradict each other", "raw uses no chat template, which think needs")
    seed = partial(broadcast, request.group, partial(secrets.randbits, 32))
    return opened.overridden(line.options, seed, system=system, raw=raw, think=think)


_CANDIDATES = 64  # of which the longest is one, as far as their bytes tell
_ENCODED = 4  # of these are tokenized, unless they do not fit the context
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Survey:
    """What is in a batch: the requests that are to be answered, and those that are answered already.

    `longest` is the tokens of the longest request, prompt and answer; it is an estimate, from the bytes of all prompts
    and the tokens of the longest ones.
    """

    requests: int
    answered: int
    longest: int


def survey(file: BatchFile, opened: ModelRequest, finished: Collection[Id]) -> Survey:
    """Read all lines once. What is wrong with a line is left to the second reading.

    Raises PromptError if there is no line at all.
    """
    answered = requests = 0
    longest: list[tuple[float, int, int]] = []  # a heap: the size in tokens, as guessed, and where the line is
    usual = opened.settings.generation.max_new_tokens
    for line in file.lines():
        size = _size(line, usual, finished)
        if size is None:
            answered += 1
            continue
        requests += 1
        heapq.heappush(longest, (size, line.number, line.start))
        if len(longest) > _CANDIDATES:
            heapq.heappop(longest)
    if not requests and not answered:
        raise PromptError(f"{file.name} has no requests", EXAMPLE)
    places = [(number, start) for _, number, start in sorted(longest, reverse=True)]
    return Survey(requests, answered, _longest(file, opened, places))


def _size(line: Line, usual: int, finished: Collection[Id]) -> float | None:
    """Return about how many tokens a line's sequence may have, 0 if the line is wrong; None if it is answered."""
    try:
        request = line.request()
    except LineError:
        return 0.0
    if request.id in finished:
        return None
    text = len(request.prompt.encode()) + len((request.system or "").encode())
    return text / _BYTES_A_TOKEN + request.options.get("max_new_tokens", usual)


def _longest(file: BatchFile, opened: ModelRequest, places: list[tuple[int, int]]) -> int:
    """Return the tokens of the longest sequence; of those that do not fit the context, only with --extend-context."""
    found: list[int] = []
    for number, start in places:
        try:
            request = file.line_at(number, start).request()
            ours = opened_for(opened, request)
            ids = ours.encode(request.prompt)
            is_stretched = opened.request.extend_context and not forgets(opened.settings.speculation)
            new = ours.settings.generation.max_new_tokens
            found.append(len(ids) + new if is_stretched else ours.prompt(ids).length)
        except Exception:  # of any kind: the second reading reports it
            continue
        if len(found) == _ENCODED:
            break
    return max(found, default=opened.context)
