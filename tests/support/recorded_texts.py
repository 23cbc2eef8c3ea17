"""Real texts as the scheduler meets them: recorded acceptances and step times, replayed without a model.

They were recorded on two cores by version 0.1. Of each token they have how probably a middle level's is accepted, in
percent, the kind of match that lookup had before it, and how many of the tokens that followed that match were right.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from offload.caches.selection import Refresh
from offload.sequence import TokenSequence
from offload.speculation.auto.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.drafters.drafter import SELECTED_PRIOR, Draft
from offload.speculation.drafters.ngram import LookupDrafter

from .paths import DATA

METHODS = ("ar", "lookup", "retrieval", "triforce", "streaming")  # beside auto
_NOISE = 0.05  # standard deviation of a step's time
_LOOKUP_S = 2e-4
_TAIL = 80  # tokens after which chunks are selected again at the latest
_NOWHERE = TokenSequence([0])


def recordings() -> list[dict[str, Any]]:
    """Return the recording of each context."""
    return [json.loads(path.read_text("utf-8")) for path in sorted((DATA / "auto").glob("*.json"))]


@dataclass
class Replay:
    """A recorded text under way: `emitted` tokens after the one at `start`; drafting has reached `cursor`."""

    text: dict[str, list[int]]
    times: dict[str, dict[str, Any]]
    rng: random.Random
    start: int = 0
    emitted: int = 0
    cursor: int = 0
    _seconds: dict[str, dict[int, float]] = field(default_factory=dict)  # of passes, by their rows

    def at(self, name: str, position: int) -> int:
        """Return what was recorded of the token at a position after the start."""
        values = self.text[name]
        return values[(self.start + position) % len(values)]

    def step(self, verifier: str, rows: int) -> float:
        """Return the seconds of a pass by rows, interpolated between the recorded ones."""
        if verifier not in self._seconds:
            recorded = self.times[verifier]["rows"].items()
            self._seconds[verifier] = dict(sorted((int(size), each / 1e3) for size, each in recorded))
        seconds = self._seconds[verifier]
        sizes = list(seconds)
        index = max(bisect_left(sizes, rows), 1)
        low, high = sizes[index - 1 : index + 1] if index < len(sizes) else sizes[-2:]
        slope = (seconds[high] - seconds[low]) / (high - low)
        return (seconds[low] + slope * (rows - low)) * max(self.rng.gauss(1, _NOISE), 0.5)


class Lookup:
    """The lookup drafter on a replay."""

    name, relative_cost, setups, branches, longest = "lookup", 0.0, 0, False, 24
    prior = LookupDrafter.prior

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def draft_kind(self, sequence):
        return self._replay.at("kind", self._replay.cursor) or None

    def setup_cost(self, sequence) -> float:
        return 0.0

    def propose(self, sequence, limit: int, tree=None) -> Draft:
        return Draft([int(self._replay.at("right", self._replay.cursor) > 0)] * limit, None)

    def draft(self, gamma: int) -> tuple[float, int]:
        """Return the seconds of a draft, and how many of its tokens are right."""
        return _LOOKUP_S, min(self._replay.at("right", self._replay.cursor), gamma)

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class Middle:
    """A middle level on a replay: it drafts by passes over selected chunks, which verify what lookup proposes."""

    longest, branches = 24, False

    def __init__(self, replay: Replay, name: str, scheduler: AdaptiveScheduler) -> None:
        self.name, self._replay, self._scheduler = name, replay, scheduler
        self._facts = replay.times[name]
        self.relative_cost, self.setups = self._facts["relative_cost"], 0
        self._refresh, self._selections, self._selected_at = Refresh(None), 0, 0

    def draft_kind(self, sequence):
        return self.name

    def prior(self, kind) -> float:
        return SELECTED_PRIOR

    def _is_due(self) -> bool:
        length = self._replay.emitted
        return not self._selections or length - self._selected_at > _TAIL or self._refresh.due(length)

    def setup_cost(self, sequence) -> float:
        return self._facts["later_cost" if self._selections else "first_cost"] if self._is_due() else 0.0

    def _select(self) -> float:
        """Select chunks if that is due; return the seconds."""
        if not self._is_due():
            return 0.0
        seconds = self._facts["later_ms" if self._selections else "first_ms"] / 1e3
        self._selections, self._selected_at = self._selections + 1, self._replay.emitted
        self._refresh.start(self._selected_at)
        self.setups += not self._facts["is_free"]
        return seconds

    def draft(self, gamma: int) -> tuple[float, int]:
        """Return the seconds of a draft, and how many of its tokens are right."""
        replay, before = self._replay, self.setups
        total, done = self._select(), 0
        while done < gamma:
            replay.cursor = replay.emitted + done
            has_setup = self.setups > before and not done
            seconds, emitted = cycle(replay, self._scheduler, gamma - done, self.name, has_setup)
            total, done = total + seconds, done + emitted
        replay.cursor = replay.emitted
        right = (replay.rng.random() < replay.at(self.name, replay.emitted + n) / 100 for n in range(gamma))
        return total, next((n for n, each in enumerate(right) if not each), gamma)

    def observe(self, drafted: int, accepted: int) -> None:
        self._refresh.observe(drafted, accepted)


def cycle(
    replay: Replay, scheduler: AdaptiveScheduler, limit: int, verifier: str, has_setup: bool = False
) -> tuple[float, int]:
    """Draft and verify up to `limit` tokens once; return the seconds and the tokens emitted."""
    first = int(replay.at("right", replay.cursor) > 0) or 2  # as lookup proposes it, if that is right
    drafter, gamma = scheduler.choose(_NOWHERE, limit - 1)
    drafter = drafter if gamma else None
    before = drafter.setups if drafter else 0
    draft_s, accepted = drafter.draft(gamma) if drafter else (0.0, 0)
    verify_s = replay.step(verifier, gamma + 1)
    if drafter:
        drafter.observe(gamma, accepted)
    selected = drafter is not None and drafter.setups > before
    scheduler.observe(Cycle(drafter, first, gamma, accepted, draft_s, verify_s, selected, has_setup))
    return draft_s + verify_s, accepted + 1


def scheduler_of(method: str, replay: Replay, tokens: int) -> AdaptiveScheduler:
    """Return the scheduler of a method's highest level, for an answer of so many tokens."""
    adaptive, lookup = method == "auto", Lookup(replay)
    names = {"retrieval": ["retrieval"], "triforce": ["retrieval"], "streaming": ["streaming"]}
    drafters = [lookup] if method in ("lookup", "auto") else []
    for name in names.get(method, ["retrieval", "streaming"] if adaptive else []):
        below = [] if method == "retrieval" else [lookup]
        drafters.append(Middle(replay, name, AdaptiveScheduler(below, None, adaptive, tokens)))
    return AdaptiveScheduler(drafters, None, adaptive, tokens, row_cost=replay.times["full"]["row_cost"])


def seconds_a_token(method: str, text: dict, times: dict, tokens: int, seed: int) -> float:
    """Return the seconds a token after the first of an answer; each seed begins elsewhere in the text."""
    start = 37 * seed % (len(text["kind"]) - tokens + 1)
    replay = Replay(text, times, random.Random(seed), start)
    scheduler, total = scheduler_of(method, replay, tokens), 0.0
    while replay.emitted < tokens:
        replay.cursor = replay.emitted
        seconds, emitted = cycle(replay, scheduler, tokens - replay.emitted, "full")
        total += seconds if replay.emitted else 0.0  # the first token comes from the prompt's last row
        replay.emitted += emitted
    return total / (tokens - 1)
