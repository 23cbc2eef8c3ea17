"""What the endpoint reports at /metrics: tokens, acceptance, queue, memory, cache hits, times."""

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.units import counted

from .engine_thread import EngineThread
from .sequences import ServedSequence

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """The metrics of one server, in a registry of its own. None has a text, a key or a client's address."""

    def __init__(self) -> None:
        self._registry, self._ended, self._written = CollectorRegistry(), 0, 0
        named = {"namespace": "triforce", "registry": self._registry}
        self._sequences = Counter("sequences", "Sequences that have ended, by how", ["reason"], **named)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts that have been read", **named)
        self._cached = Counter("cached_prompt_tokens", "Of those, not run but found", ["where"], **named)
        self._new = Counter("generated_tokens", "Tokens that have been written", **named)
        pair = ["drafter", "verifier"]
        self._verified = Counter("verified_draft_tokens", "Drafted tokens that were verified", pair, **named)
        self._accepted = Counter("accepted_draft_tokens", "Drafted tokens that were accepted", pair, **named)
        self._ttft = Histogram("time_to_first_token_seconds", "With the time in the queue", buckets=_SECONDS, **named)
        self._tbt = Histogram("time_between_tokens_seconds", "Mean of a sequence", buckets=_BETWEEN, **named)
        self._total = Histogram("sequence_seconds", "From the queue to the end", buckets=_SECONDS, **named)
        memory = Gauge("resident_memory_bytes", "Memory of the process", **named)
        memory.set_function(lambda: psutil.Process().memory_info().rss)

    def watch(self, engine: EngineThread) -> None:
        """Report how many sequences the engine runs, and how many wait."""
        named = {"namespace": "triforce", "registry": self._registry}
        Gauge("sequences_running", "Sequences in the batch", **named).set_function(lambda: len(engine.running))
        Gauge("sequences_waiting", "Sequences in the queue", **named).set_function(lambda: len(engine.waiting))

    def ended(self, sequence: ServedSequence, event: BatchEvent) -> None:
        """Count a sequence with its last event. Called by the engine's thread and by the event loop."""
        meter = sequence.meter
        names = {Failed: "error", Cancelled: "cancelled"}
        self._sequences.labels(names.get(type(event), meter.finish_reason or "error")).inc()
        self._prompt.inc(meter.prefilled_tokens)
        self._cached.labels("disk").inc(meter.restored_tokens)
        self._cached.labels("memory").inc(meter.cached_tokens - meter.restored_tokens)
        self._new.inc(meter.new_tokens)
        self._ended, self._written = self._ended + 1, self._written + meter.new_tokens
        for level in meter.levels:
            self._verified.labels(level.drafter, level.verifier).inc(level.verified)
            self._accepted.labels(level.drafter, level.verifier).inc(level.accepted)
        summary = meter.summary(meter.finish_reason or "interrupted")
        if summary.ttft_s is not None:
            self._ttft.observe(summary.ttft_s)
        if meter.gaps:
            self._tbt.observe(sum(meter.gaps) / len(meter.gaps))
        self._total.observe(summary.total_s)

    def total(self) -> str:
        """Return in one line what has been generated."""
        return f"ended after {counted(self._ended, 'answer')} of {counted(self._written, 'token')}"

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
