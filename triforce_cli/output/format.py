"""Formats numbers for people: the statistics line, and what it shares with the status line and tables."""

from __future__ import annotations

from collections.abc import Mapping

from offload.metrics import Summary
from offload.units import GIB, counted


def statistics_line(summary: Summary) -> str:
    """Return the summary in one line; what did not happen is left out."""
    parts = [_prefill(summary), _decode(summary)]
    if summary.ttft_s is not None:
        parts.append(f"TTFT {duration(summary.ttft_s)}")
    if summary.tbt_median_s is not None:
        tail = f" (p95 {milliseconds(summary.tbt_p95_s)})" if summary.tbt_p95_s is not None else ""
        parts.append(f"TBT {milliseconds(summary.tbt_median_s)} ms{tail}")
    parts += _speculation(summary)
    if summary.link_bytes is not None:
        parts.append(f"link {size(summary.link_bytes)}, busy {percent(summary.link_utilisation or 0.0)}")
    parts.append(summary.finish_reason)
    if summary.seed is not None:
        parts.append(f"seed {summary.seed}")
    if summary.peak_memory_bytes is not None:
        parts.append(f"{summary.peak_memory_bytes / GIB:.1f} GiB")
    return " · ".join(parts)


def _speculation(summary: Summary) -> list[str]:
    parts = [] if summary.method is None else [summary.method]
    if not summary.acceptance:
        return parts  # nothing was drafted: decoding was plain
    parts += accepted(summary.acceptance)
    parts.append(f"{summary.tokens_per_verification:.1f} tokens/verification")
    shares = [f"{name} {percent(share)}" for name, share in summary.time_share.items() if share > 0]
    return [*parts, " ".join(shares)] if shares else parts


def accepted(acceptance: Mapping[str, float]) -> list[str]:
    """Return `lookup→full 83 %` for each pair of drafter and verifier."""
    return [f"{pair.replace(' -> ', '→')} {percent(rate)}" for pair, rate in acceptance.items()]


def _prefill(summary: Summary) -> str:
    text = counted(summary.prompt_tokens, "prompt token")
    if summary.prefilled_tokens < summary.prompt_tokens:
        text = f"{summary.prefilled_tokens:,} of {text}"
    if summary.cached_tokens:
        text += f", {summary.cached_tokens:,} of them cached,"
    if summary.prefill_s is not None:
        text += f" in {duration(summary.prefill_s)}"
    if summary.prefill_tokens_per_s is not None:
        text += f" ({summary.prefill_tokens_per_s:,.0f}/s)"
    return text


def _decode(summary: Summary) -> str:
    text = counted(summary.new_tokens, "token")
    return text if summary.tokens_per_s is None else f"{text} at {summary.tokens_per_s:.1f}/s"


def size(count: int) -> str:
    """Return bytes in decimal units, as data sheets give them: `12.3 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Return `120 ms` or `3.4 s`."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def milliseconds(seconds: float) -> str:
    """Return the milliseconds without a unit, with a decimal below 10."""
    return f"{seconds * 1000:.1f}" if seconds < 0.01 else f"{seconds * 1000:.0f}"


def percent(fraction: float) -> str:
    """Return `83 %`."""
    return f"{100 * fraction:.0f} %"
