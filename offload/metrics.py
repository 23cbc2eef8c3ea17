"""Metrics of a generation: a meter that observes its events, and the summary that it returns. Knows no terminal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .events import Event, Finished, LevelStatistics, Prefilled, Restored, Speculated, Text, Tokens, Transferred

FULL = "full"  # the verifier whose distribution is what comes out


@dataclass(frozen=True, slots=True)
class Summary:
    """One generation in numbers. Times in seconds, rates in tokens per second; None is what never happened."""

    finish_reason: str  # "eos", "stop", "length" or "interrupted"
    prompt_tokens: int
    prefilled_tokens: int  # fewer than the prompt's if interrupted
    new_tokens: int
    prefill_s: float | None
    prefill_tokens_per_s: float | None
    ttft_s: float | None
    tbt_median_s: float | None
    tbt_p95_s: float | None
    tokens_per_s: float | None
    total_s: float
    seed: int | None = None
    method: str | None = None
    model: str | None = None
    peak_memory_bytes: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    verifications: int | None = None  # passes over the full KV cache; a plain step is one too
    tokens_per_verification: float | None = None
    acceptance: Mapping[str, float] = field(default_factory=dict)  # "lookup -> full": 0.83
    time_share: Mapping[str, float] = field(default_factory=dict)  # of decoding: "draft", "middle", "verify"
    cached_tokens: int = 0  # of the prompt, that need not be run: held in memory, or read from disk
    link_bytes: int | None = None  # that went between host memory and the device; None where nothing does
    link_utilisation: float | None = None  # the share of the time in which the link was busy
    load_s: float | None = None  # to find, check and load the model
    verify: Mapping[str, Any] | None = None  # the comparison with plain decoding, if it was asked for


class Meter:
    """Measures one generation from its own construction on, and keeps what was emitted.

    It must see every event once, when it comes: through `watch`, or by `observe`. Displays read from it.
    """

    def __init__(self, prompt_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.prompt_tokens = prompt_tokens
        self.prefilled_tokens = self.cached_tokens = 0
        self.ids: list[int] = []  # the tokens emitted so far
        self.finish_reason: str | None = None  # of the Finished event
        self._clock = clock
        self._start = clock()
        self._prefilled_at: float | None = None
        self._first_at: float | None = None  # first and last Tokens event
        self._last_at: float | None = None
        self._first_run = 0  # tokens in the first event
        self.gaps: list[float] = []  # time between tokens, one for each token after the first event
        self.speculated: Speculated | None = None  # the latest
        self.transferred: Transferred | None = None
        self._pieces: list[str] = []

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """Observe each event, then yield it."""
        for event in events:
            self.observe(event)
            yield event

    def observe(self, event: Event) -> None:
        """Record an event, at the time of this call."""
        if isinstance(event, Prefilled):
            if self._prefilled_at is None:
                self.cached_tokens = event.done
            self.prefilled_tokens, self._prefilled_at = event.done, self._clock()
        elif isinstance(event, Restored):
            self.cached_tokens += event.tokens
        elif isinstance(event, Tokens) and event.ids:
            self._count(len(event.ids), self._clock())
            self.ids += event.ids
        elif isinstance(event, Text):
            self._pieces.append(event.text)
        elif isinstance(event, Speculated):
            self.speculated = event
        elif isinstance(event, Transferred):
            self.transferred = event
        elif isinstance(event, Finished):
            self.finish_reason = event.reason

    def _count(self, tokens: int, now: float) -> None:
        if self._last_at is None:
            self._first_at, self._first_run = now, tokens
        else:  # a run of verified tokens arrives at once: each took its share of the wait
            self.gaps += [(now - self._last_at) / tokens] * tokens
        self._last_at = now

    @property
    def new_tokens(self) -> int:
        return len(self.ids)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def prefill_s(self) -> float | None:
        return None if self._prefilled_at is None else self._prefilled_at - self._start

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Of the tokens that were run."""
        return _rate(self.prefilled_tokens - self.cached_tokens, self.prefill_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding only: the tokens after the first event over the time since it."""
        if self._first_at is None or self._last_at is None:
            return None
        return _rate(self.new_tokens - self._first_run, self._last_at - self._first_at)

    @property
    def link_utilisation(self) -> float | None:
        """The share of the time since the beginning in which the link was busy; None where there is none."""
        took = self._clock() - self._start
        return None if self.transferred is None or took <= 0 else min(self.transferred.busy_s / took, 1.0)

    @property
    def levels(self) -> tuple[LevelStatistics, ...]:
        """What each drafter did for each verifier so far."""
        return () if self.speculated is None else self.speculated.levels

    def summary(self, finish_reason: str, **facts: Any) -> Summary:
        """The numbers so far. `facts` are the fields of `Summary` that only the caller knows: seed, method, …"""
        return Summary(
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            prefilled_tokens=self.prefilled_tokens,
            new_tokens=self.new_tokens,
            prefill_s=self.prefill_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            ttft_s=None if self._first_at is None else self._first_at - self._start,
            tbt_median_s=statistics.median(self.gaps) if self.gaps else None,
            tbt_p95_s=percentile(self.gaps, 0.95) if self.gaps else None,
            tokens_per_s=self.tokens_per_s,
            total_s=self._clock() - self._start,
            verifications=verifications(self.levels) or None,
            # Of what was kept: a stop string or the end of the text may have cut the last run short.
            tokens_per_verification=_rate(self.new_tokens, verifications(self.levels)),
            acceptance=acceptance(self.levels),
            time_share=time_share(self.levels),
            cached_tokens=self.cached_tokens,
            link_bytes=None if self.transferred is None else self.transferred.bytes,
            link_utilisation=self.link_utilisation,
            **facts,
        )


def verifications(levels: Sequence[LevelStatistics]) -> int:
    """Passes over the full KV cache."""
    return sum(row.verifications for row in _over_full(levels))


def tokens_per_verification(levels: Sequence[LevelStatistics]) -> float | None:
    """Every verification emits the tokens that it accepts and one of its own."""
    passes = verifications(levels)
    return 1 + sum(row.accepted for row in _over_full(levels)) / passes if passes else None


def acceptance(levels: Sequence[LevelStatistics]) -> dict[str, float]:
    """Acceptance rates by "drafter -> verifier"; pairs with no judged token are left out."""
    return {f"{row.drafter} -> {row.verifier}": row.acceptance for row in levels if row.acceptance is not None}


def time_share(levels: Sequence[LevelStatistics]) -> dict[str, float]:
    """How the time of decoding divides: "draft", "middle" and "verify"; {} if there was none.

    A level's draft_s holds all the time of the levels below it, so the top level's sum is everything, and what neither
    verifier took was spent on drafts.
    """
    full = _over_full(levels)
    total = sum(row.draft_s + row.verify_s for row in full)
    if total <= 0:
        return {}
    verify = sum(row.verify_s for row in full)
    middle = sum(row.verify_s for row in levels if row.verifier != FULL)
    return {
        "draft": max(total - verify - middle, 0.0) / total,
        "middle": middle / total,
        "verify": verify / total,
    }


def _over_full(levels: Sequence[LevelStatistics]) -> list[LevelStatistics]:
    return [row for row in levels if row.verifier == FULL]


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which this fraction of them lies, interpolated between neighbours (numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _rate(tokens: int, each: float | None) -> float | None:
    return tokens / each if each and tokens else None
