"""Metrics of a generation: a meter that observes its events, and the summary that it returns."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .events import (
    Event,
    ExpertsRun,
    Finished,
    LevelStatistics,
    Prefilled,
    Restored,
    Speculated,
    Text,
    Thought,
    Tokens,
    Transferred,
)
from .level_metrics import speculation_metrics


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of one generation. Times in seconds, rates in tokens per second; None for what did not happen."""

    finish_reason: str  # "eos", "stop", "length" or "interrupted"
    prompt_tokens: int
    prefilled_tokens: int  # fewer than the prompt's if interrupted
    new_tokens: int
    prefill_s: float | None
    prefill_tokens_per_s: float | None  # of the computed tokens, without the time of restoring
    ttft_s: float | None
    tbt_median_s: float | None
    tbt_p95_s: float | None
    tokens_per_s: float | None
    total_s: float
    thinking_tokens: int = 0  # of the new ones, what a reasoning model thinks before its answer
    seed: int | None = None
    sampling: str | None = None  # "greedy", "coupled" or "fastest"
    method: str | None = None
    exact: bool = True  # whether attention was to all tokens, and to their keys and values as they are
    approximate: str | None = None  # otherwise, the cache that took the place of all keys and values
    kv: str | None = None  # the format to which keys and values were quantised
    model: str | None = None
    peak_memory_bytes: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    verifications: int | None = None  # passes over the full KV cache; a plain step is one too
    tokens_per_verification: float | None = None
    speedup: float | None = None  # over plain decoding, estimated; None without plain steps to compare, and in batches
    plain_step_s: float | None = None  # as measured among the verifications
    cycle_s: float | None = None  # of a draft and its verification in the mean
    acceptance: Mapping[str, float] = field(default_factory=dict)  # "lookup -> full": 0.83
    accepted_of_drafted: Mapping[str, float] = field(default_factory=dict)
    time_share: Mapping[str, float] = field(default_factory=dict)  # of decoding: "draft", "middle", "verify"
    trees: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by pair: `TreeStatistics.means`
    cached_tokens: int = 0  # of the prompt, that were not run: in memory before, or restored
    restored_tokens: int = 0  # of those, read from a prompt cache on disk
    restore_s: float | None = None
    restored_tokens_per_s: float | None = None
    computed_tokens: int = 0  # of the prompt, that were run
    saved_tokens: int = 0  # of those, that are in the prompt cache on disk since
    link_bytes: int | None = None  # transferred between host memory and the device; None without offloading
    link_utilisation: float | None = None  # share of the time that the link was busy
    experts: Mapping[str, Any] | None = None  # what those in host memory did: the fields of `ExpertsRun`; None without
    load_s: float | None = None  # to find, check and load the model
    quantize: str | None = None  # the level to which the weights were rounded on loading
    batch_size: int | None = None  # sequences that ran at this one's end, itself included
    masks: Mapping[str, Any] | None = None  # of a constraint: the fields of `MaskStatistics`
    quotes: Sequence[Mapping[str, Any]] | None = None  # the quotations of --quote: text, start and end in the document
    verify: Mapping[str, Any] | None = None  # the comparison with plain decoding, if --verify was given


class Meter:
    """Measures one generation, from the construction of the meter on, and keeps the emitted tokens and text.

    It must observe every event once, when the event is yielded: through `watch` or `observe`.
    """

    def __init__(self, prompt_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.prompt_tokens = prompt_tokens
        self.prefilled_tokens = 0
        self.restored_tokens = 0  # read from a prompt cache on disk
        self.restore_s: float | None = None
        self._cached_before = 0  # tokens in memory before the prefill
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
        self.experts_run: ExpertsRun | None = None
        self.pieces: list[str] = []  # of the answer's text
        self.thoughts: list[str] = []  # pieces of what was thought before the answer
        self.thinking_tokens = 0

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """Observe each event, then yield it."""
        for event in events:
            self.observe(event)
            yield event

    def observe(self, event: Event) -> None:
        """Record an event, at the time of this call."""
        if isinstance(event, Prefilled):
            self._observe_prefill(event, self._clock())
        elif isinstance(event, Restored):
            self.restored_tokens, self.restore_s = event.tokens, event.seconds
        elif isinstance(event, Tokens) and event.ids:
            self._count(len(event.ids), self._clock())
            self.ids += event.ids
        elif isinstance(event, Text):
            self.pieces += [event.text] if event.text else []
        elif isinstance(event, Thought):
            self.thoughts += [event.text] if event.text else []
            self.thinking_tokens += event.tokens
        elif isinstance(event, Speculated):
            self.speculated = event
        elif isinstance(event, Transferred):
            self.transferred = event
        elif isinstance(event, ExpertsRun):
            self.experts_run = event
        elif isinstance(event, Finished):
            self.finish_reason = event.reason

    def _observe_prefill(self, event: Prefilled, now: float) -> None:
        new = event.done - self.prefilled_tokens
        if self._prefilled_at is None:
            self._cached_before = event.done
        elif event.restored:
            self.restored_tokens += new
            self.restore_s = (self.restore_s or 0.0) + now - self._prefilled_at
        elif new < 0:  # restored tokens that have to be run: of a chunk of which others are damaged
            self.restored_tokens = max(self.restored_tokens + new, 0)
        self.prefilled_tokens, self._prefilled_at = event.done, now

    def _count(self, tokens: int, now: float) -> None:
        if self._last_at is None:
            self._first_at, self._first_run = now, tokens
        else:  # verified tokens arrive together: the wait is divided equally among them
            self.gaps += [(now - self._last_at) / tokens] * tokens
        self._last_at = now

    @property
    def new_tokens(self) -> int:
        return len(self.ids)

    @property
    def text(self) -> str:
        """The text so far, of the answer alone."""
        return "".join(self.pieces)

    @property
    def prefill_s(self) -> float | None:
        return None if self._prefilled_at is None else self._prefilled_at - self._start

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not run: in memory before, or restored."""
        return self._cached_before + self.restored_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were run."""
        return max(self.prefilled_tokens - self.cached_tokens, 0)

    @property
    def tokens_per_s(self) -> float | None:
        """The decoding rate: tokens after the first event over the time since it."""
        if self._first_at is None or self._last_at is None:
            return None
        return _rate(self.new_tokens - self._first_run, self._last_at - self._first_at)

    @property
    def link_utilisation(self) -> float | None:
        """The share of the time so far that the link was busy; None without offloading."""
        elapsed = self._clock() - self._start
        return None if self.transferred is None or elapsed <= 0 else min(self.transferred.busy_s / elapsed, 1.0)

    @property
    def levels(self) -> tuple[LevelStatistics, ...]:
        """The statistics of each drafter and verifier so far."""
        return () if self.speculated is None else self.speculated.levels

    def summary(self, finish_reason: str, **facts: Any) -> Summary:
        """Return the metrics so far. `facts` are the fields of `Summary` that only the caller knows: seed, method, …"""
        alone = (facts.get("batch_size") or 1) <= 1  # in a batch, a sequence's time is only its share of the passes
        gain = self.speculated.gain if self.speculated is not None and alone else None
        masks = None if self.speculated is None else self.speculated.masks
        computed, prefill_s = self.computed_tokens, self.prefill_s
        of_levels = speculation_metrics(self.levels, masks)
        return Summary(
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            prefilled_tokens=self.prefilled_tokens,
            new_tokens=self.new_tokens,
            thinking_tokens=self.thinking_tokens,
            prefill_s=prefill_s,
            prefill_tokens_per_s=None if prefill_s is None else _rate(computed, prefill_s - (self.restore_s or 0.0)),
            ttft_s=None if self._first_at is None else self._first_at - self._start,
            tbt_median_s=statistics.median(self.gaps) if self.gaps else None,
            tbt_p95_s=percentile(self.gaps, 0.95) if self.gaps else None,
            tokens_per_s=self.tokens_per_s,
            total_s=self._clock() - self._start,
            # Emitted tokens only: a stop string or an end-of-sequence token may have cut the last run.
            tokens_per_verification=_rate(self.new_tokens, of_levels["verifications"]),
            speedup=None if gain is None else gain.speedup,
            plain_step_s=None if gain is None else gain.step_s,
            cached_tokens=self.cached_tokens,
            restored_tokens=self.restored_tokens,
            restore_s=self.restore_s,
            restored_tokens_per_s=_rate(self.restored_tokens, self.restore_s),
            computed_tokens=computed,
            link_bytes=None if self.transferred is None else self.transferred.bytes,
            link_utilisation=self.link_utilisation,
            masks=None if masks is None else asdict(masks),
            experts=None if self.experts_run is None else asdict(self.experts_run),
            **of_levels,
            **facts,
        )


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the percentile at `fraction`, interpolated linearly between neighbours (numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _rate(tokens: int, divisor: float | None) -> float | None:
    return tokens / divisor if divisor and divisor > 0 and tokens else None
