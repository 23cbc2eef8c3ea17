"""What is said of a generation: its statistics, `--verify`'s result, and how a model with rounded weights agrees."""

from collections.abc import Iterator, Mapping
from typing import Any

from offload.metrics import Summary
from offload.units import GIB, counted

from .format import accepted, duration, milliseconds, percent, rate, size
from .tables import SEPARATOR

INDENT = 10  # cells of the names in `detail_lines`
_ENDINGS = {"length": "stopped at the token limit", "interrupted": "interrupted"}
_REASONS = {"eos": "end-of-sequence token", "stop": "stop string", "length": "token limit"}


def statistics_line(summary: Summary) -> str:
    """Return in one line what was read and written, what was rounded or approximated, and the limit that ended it."""
    parts = [reading(summary), _written(summary)]
    if summary.quantize is not None:
        parts.append(f"weights rounded to {summary.quantize}")
    if summary.approximate is not None:
        parts.append(f"approximate ({summary.approximate})")
    if summary.kv is not None:
        parts.append(f"approximate ({summary.kv} keys and values)")
    if summary.finish_reason in _ENDINGS:
        is_thinking = 0 < summary.thinking_tokens == summary.new_tokens
        parts.append(_ENDINGS[summary.finish_reason] + (", before the answer" if is_thinking else ""))
    return SEPARATOR.join(parts)


def reading(summary: Summary) -> str:
    """Return what was read, from where, and how long that took."""
    text = f"{counted(summary.prompt_tokens, 'token')} read"
    if summary.prefilled_tokens < summary.prompt_tokens:
        text = f"{summary.prefilled_tokens:,} of {text}"
    if summary.prefill_s is not None and summary.prefilled_tokens:  # else it is the time of the preparations alone
        text += f" in {duration(summary.prefill_s)}"
    return f"{text} ({summary.cached_tokens:,} from the cache)" if summary.cached_tokens else text


def _written(summary: Summary) -> str:
    text = f"{summary.new_tokens:,} written"
    if summary.thinking_tokens:
        text += f" ({summary.thinking_tokens:,} of thinking)"
    if summary.tokens_per_s is not None:
        text += f" at {rate(summary.tokens_per_s)}"
        text += "" if summary.speedup is None else f", {gained(summary.speedup)}"
    return f"{text} in a batch of {summary.batch_size:.1f}" if (summary.batch_size or 1) > 1 else text


def gained(speedup: float) -> str:
    """Return `about 1.4 times plain decoding`, or that it is as fast."""
    times = f"{speedup:.1f}" if speedup < 9.95 else f"{speedup:.0f}"
    return "as fast as plain decoding" if times == "1.0" else f"about {times} times plain decoding"


def detail_lines(summary: Summary) -> list[str]:
    """Return a line for each group of numbers, for `--verbose`; missing values are left out.

    The numbers begin behind `INDENT` cells.
    """
    return [f"{name:<{INDENT}}{SEPARATOR.join(texts)}" for name, texts in _details(summary) if texts]


def _details(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    yield "method", _speculation(summary)
    yield "gain", _gain(summary)
    yield "trees", [_tree(pair, each) for pair, each in summary.trees.items()]
    yield "times", _times(summary)
    yield "decoding", [f"{name} {percent(share)}" for name, share in summary.time_share.items() if share > 0]
    if summary.link_bytes is not None:
        yield "link", [f"{size(summary.link_bytes)}, busy {percent(summary.link_utilisation or 0.0)} of the time"]
    if summary.experts is not None:
        yield "experts", [_experts(summary.experts)]
    if summary.masks is not None:
        yield "masks", _masks(summary.masks)
    yield "end", [_REASONS.get(summary.finish_reason, summary.finish_reason)]
    if summary.seed is not None:
        yield "seed", [str(summary.seed), *([] if summary.sampling is None else [f"{summary.sampling} sampling"])]
    if summary.peak_memory_bytes is not None:
        yield "memory", [f"{summary.peak_memory_bytes / GIB:.1f} GiB at most"]


_CHILDREN = 4  # whose acceptance is shown


def _tree(pair: str, tree: Mapping[str, Any]) -> str:
    """Return `draft→full 63 nodes, 9.2 deep, 4.1 accepted (children 62 %, 13 %)`, each a mean over the trees."""
    shape = f"{tree['nodes']:.0f} nodes, {tree['depth']:.1f} deep, {tree['accepted_depth']:.1f} accepted"
    children = ", ".join(percent(rate) for rate in tree["child_acceptance"][:_CHILDREN])
    return f"{pair.replace(' -> ', '→')} {shape} (children {children})"


def _experts(run: Mapping[str, Any]) -> str:
    """Return `in host memory in 2 layers: 5.1 in each of a pass, 12.3 MB read, 0.4 s`."""
    where = f"in host memory in {counted(run['layers'], 'layer')}"
    mean = f"{run['experts'] / max(run['passes'], 1):.1f} in each of a pass"
    return f"{where}: {mean}, {size(run['bytes'])} read, {duration(run['seconds'])}"


def _masks(run: Mapping[str, Any]) -> list[str]:
    """Return `120 computed, 90 rows masked in 40 us each` and `52 tokens dictated`."""
    each = run["seconds"] / max(run["rows"], 1)
    masked = f"{run['masks']:,} computed, {counted(run['rows'], 'row')} masked in {each * 1e6:,.0f} us each"
    return [masked, f"{counted(run['forced'], 'token')} dictated"]


def _times(summary: Summary) -> list[str]:
    parts = [] if summary.load_s is None else [f"load {duration(summary.load_s)}"]
    if summary.restored_tokens_per_s is not None:
        parts.append(f"reading the cache {rate(summary.restored_tokens_per_s)}")
    if summary.prefill_tokens_per_s is not None:
        parts.append(f"prefill {rate(summary.prefill_tokens_per_s)}")
    if summary.ttft_s is not None:
        parts.append(f"TTFT {duration(summary.ttft_s)}")
    if summary.tbt_median_s is not None:
        tail = f" (p95 {milliseconds(summary.tbt_p95_s)})" if summary.tbt_p95_s is not None else ""
        parts.append(f"TBT {milliseconds(summary.tbt_median_s)} ms{tail}")
    return parts


def _gain(summary: Summary) -> list[str]:
    """Return what was gained over plain decoding, and from what; nothing where no step can be compared with."""
    if summary.speedup is None or summary.plain_step_s is None:
        return []
    parts = [f"{summary.speedup:.2f} times plain decoding", f"a plain step {milliseconds(summary.plain_step_s)} ms"]
    if summary.cycle_s is not None:
        parts.append(f"a draft and its verification {milliseconds(summary.cycle_s)} ms")
    return parts


def _speculation(summary: Summary) -> list[str]:
    parts = [] if summary.method is None else [summary.method]
    if not summary.acceptance:
        return parts  # nothing was drafted: decoding was plain
    rates = accepted(summary.acceptance, summary.accepted_of_drafted)
    return [*parts, *rates, f"{summary.tokens_per_verification:.1f} tokens/verification"]


def quantized_warning(level: str, agreement: float | None) -> str:
    """Return that the model is another one now, and how often both chose the same token on the prompt, if known."""
    if agreement is None:
        return f"--quantize {level} changes the model: there is too little memory to measure by how much"
    return (
        f"--quantize {level} changes the model: on the end of the prompt it chooses the token of the original weights "
        f"{percent(agreement)} of the time"
    )


def verification_line(verify: Mapping[str, Any]) -> str:
    """Return one line: what was compared with what, and where rounding decides."""
    tokens = counted(verify["tokens"], "token")
    if verify["equal"]:
        return f"verify: {tokens} equal plain decoding ({verify['compared_with']}){_narrow(verify['closest'])}"
    first = verify["divergences"][0]
    tie = "a floating-point tie" if first["is_tie"] else "more than rounding"
    more = verify["differing"] - 1
    rest = f"; {more:,} more of {tokens} differ" if more else f"; the rest of {tokens} is equal"
    return (
        f"verify: token {first['position']} is {first['emitted_text']!r} where plain decoding has "
        f"{first['expected_text']!r} (margin {first['margin']:.3g}, noise {first['noise']:.3g}: {tie}){rest} "
        f"({verify['compared_with']})"
    )


def _narrow(choice: Mapping[str, Any] | None) -> str:
    """Return the narrowest decision, where the same model may decide otherwise on other hardware or ranks."""
    if choice is None or not choice["within_rounding"]:
        return ""
    return (
        f"; closest: token {choice['position']}, {choice['chosen_text']!r} before {choice['runner_up_text']!r} by "
        f"{choice['margin']:.2g}, where another kernel or number of ranks may round by {choice['noise']:.2g}"
    )
