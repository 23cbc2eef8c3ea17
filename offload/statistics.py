"""How fast it went: a meter that watches the events of one generation, and the summary it gives. Knows no terminal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .events import Event, Prefilled, Tokens


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


class Meter:
    """Measures one generation from its own construction on. Give it every event with `observe`, as it comes."""

    def __init__(self, prompt_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.prompt_tokens = prompt_tokens
        self.prefilled_tokens = 0
        self.new_tokens = 0
        self._clock = clock
        self._start = clock()
        self._prefilled_at: float | None = None
        self._first_at: float | None = None  # first and last Tokens event
        self._last_at: float | None = None
        self._first_run = 0  # tokens in the first event
        self._gaps: list[float] = []  # time between tokens, one for each token after the first event

    def observe(self, event: Event) -> None:
        """Take note of an event, at the time of this call."""
        if isinstance(event, Prefilled):
            self.prefilled_tokens, self._prefilled_at = event.done, self._clock()
        elif isinstance(event, Tokens) and event.ids:
            self._count(len(event.ids), self._clock())

    def _count(self, tokens: int, now: float) -> None:
        if self._last_at is None:
            self._first_at, self._first_run = now, tokens
        else:  # a run of verified tokens arrives at once: each took its share of the wait
            self._gaps += [(now - self._last_at) / tokens] * tokens
        self._last_at = now
        self.new_tokens += tokens

    @property
    def prefill_s(self) -> float | None:
        return None if self._prefilled_at is None else self._prefilled_at - self._start

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return _rate(self.prefilled_tokens, self.prefill_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding only: the tokens after the first event over the time since it."""
        if self._first_at is None or self._last_at is None:
            return None
        return _rate(self.new_tokens - self._first_run, self._last_at - self._first_at)

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
            tbt_median_s=statistics.median(self._gaps) if self._gaps else None,
            tbt_p95_s=percentile(self._gaps, 0.95) if self._gaps else None,
            tokens_per_s=self.tokens_per_s,
            total_s=self._clock() - self._start,
            **facts,
        )


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which this fraction of them lies, interpolated between neighbours (numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _rate(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds and tokens else None
