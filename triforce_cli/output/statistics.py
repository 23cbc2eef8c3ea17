"""What is said of a generation: its statistics, `--verify`'s result, and how a model with rounded weights agrees."""

from collections.abc import Iterator, Mapping
from typing import Any

from offload.metrics import Summary
from offload.units import GIB, counted

from .format import accepted, duration, gained, milliseconds, percent, rate, size
from .tables import SEPARATOR

INDENT = 10  # cells of the names in `detail_lines`
_ENDINGS = {"length": "stopped at the token limit", "interrupted": "interrupted"}
_REASONS = {"eos": "end-of-sequence token", "stop": "stop string", "length": "token limit"}


def statistics_line(summary: Summary) -> str:
    """Return in one line what was read and written, what was rounded or approximated, and the limit that ended it."""
    lossy = [f"weights rounded to {summary.quantize}"] if summary.quantize is not None else []
    lossy += [f"approximate ({summary.approximate})"] if summary.approximate is not None else []
    lossy += [f"approximate ({summary.kv} keys and values)"] if summary.kv is not None else []
    ending = [_ENDINGS[summary.finish_reason]] if summary.finish_reason in _ENDINGS else []
    if ending and 0 < summary.thinking_tokens == summary.new_tokens:
        ending[0] += ", before the answer"
    return SEPARATOR.join([reading(summary), _written(summary), *lossy, *ending])


def reading(summary: Summary) -> str:
    """Return what was read, from where, and how long that took."""
    text = f"{counted(summary.prompt_tokens, 'token')} read"
    if summary.prefilled_tokens < summary.prompt_tokens:
        text = f"{summary.prefilled_tokens:,} of {text}"
    if summary.prefill_s is not None and summary.prefilled_tokens:  # else it is the time of the preparations alone
        text += f" in {duration(summary.prefill_s)}"
    cache = [f"{summary.cached_tokens:,} from the cache"] if summary.cached_tokens else []
    cache += [f"{summary.saved_tokens:,} cached for later"] if summary.saved_tokens else []
    return f"{text} ({', '.join(cache)})" if cache else text


def _written(summary: Summary) -> str:
    text = f"{summary.new_tokens:,} written"
    text += f" ({summary.thinking_tokens:,} of thinking)" if summary.thinking_tokens else ""
    if summary.tokens_per_s is not None:
        gain = "" if summary.speedup is None else gained(summary.speedup)
        text += f" at {rate(summary.tokens_per_s)}" + (f", {gain}" if gain else "")
    return f"{text} in a batch of {summary.batch_size}" if (summary.batch_size or 1) > 1 else text


def detail_lines(summary: Summary) -> list[str]:
    """Return a line for each group of numbers, for `--verbose`; missing values are left out.

    The numbers begin behind `INDENT` cells.
    """
    lines = ((name, [text for text in texts if text]) for name, texts in _details(summary))
    return [f"{name:<{INDENT}}{SEPARATOR.join(texts)}" for name, texts in lines if texts]


def _details(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    yield "method", _speculation(summary)
    if summary.speedup is not None and summary.plain_step_s is not None:
        cycle = summary.cycle_s
        plain = f"a plain step {milliseconds(summary.plain_step_s)} ms"
        drafted = "" if cycle is None else f"a draft and its verification {milliseconds(cycle)} ms"
        yield "gain", [f"{summary.speedup:.2f} times plain decoding", plain, drafted]
    yield "times", _times(summary)
    if summary.link_bytes is not None:
        yield "link", [f"{size(summary.link_bytes)}, busy {percent(summary.link_utilisation or 0.0)} of the time"]
    yield "end", [_REASONS.get(summary.finish_reason, summary.finish_reason)]
    if summary.seed is not None:
        yield "seed", [str(summary.seed), "" if summary.sampling is None else f"{summary.sampling} sampling"]
    if summary.peak_memory_bytes is not None:
        yield "memory", [f"{summary.peak_memory_bytes / GIB:.1f} GiB at most"]


def _speculation(summary: Summary) -> list[str]:
    if not summary.acceptance:
        return [summary.method or ""]  # nothing was drafted: decoding was plain
    rates = accepted(summary.acceptance, summary.accepted_of_drafted)
    return [summary.method or "", *rates, f"{summary.tokens_per_verification:.1f} tokens/verification"]


def _times(summary: Summary) -> list[str]:
    parts = [] if summary.load_s is None else [f"load {duration(summary.load_s)}"]
    if summary.restored_tokens_per_s is not None:
        parts.append(f"reading the cache {rate(summary.restored_tokens_per_s)}")
    if summary.prefill_tokens_per_s is not None:
        parts.append(f"prefill {rate(summary.prefill_tokens_per_s)}")
    if summary.ttft_s is not None:
        parts.append(f"TTFT {duration(summary.ttft_s)}")
    if summary.tbt_median_s is not None:
        tail = "" if summary.tbt_p95_s is None else f" (p95 {milliseconds(summary.tbt_p95_s)})"
        parts.append(f"TBT {milliseconds(summary.tbt_median_s)} ms{tail}")
    return parts


def verification_line(verify: Mapping[str, Any]) -> str:
    """Return one line: what was compared with what, and the first difference."""
    tokens = counted(verify["tokens"], "token")
    if verify["equal"]:
        return f"verify: {tokens} equal plain decoding ({verify['compared_with']})"
    first, more = verify["divergences"][0], verify["differing"] - 1
    tie = "a floating-point tie" if first["is_tie"] else "more than rounding"
    others = f"; {more:,} more of {tokens} differ" if more else f"; the rest of {tokens} is equal"
    return (
        f"verify: token {first['position']} is {first['emitted_text']!r} where plain decoding has "
        f"{first['expected_text']!r} (margin {first['margin']:.3g}, noise {first['noise']:.3g}: {tie}){others} "
        f"({verify['compared_with']})"
    )
