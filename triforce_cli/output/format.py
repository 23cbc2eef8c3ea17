"""Formats numbers for people and for JSON."""

import math
from collections.abc import Mapping
from typing import Any

_DIGITS = 4  # significant, of a measured number


def rounded(value: Any) -> Any:
    """Return the value with all floats in it, also in mappings and sequences, rounded to significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def accepted(acceptance: Mapping[str, float], of_drafted: Mapping[str, float], unit: str = " of drafted") -> list[str]:
    """Return `lookup→full 83 % (49 % of drafted)` for each pair of drafter and verifier."""
    shares = {pair: f" ({percent(share)}{unit})" for pair, share in of_drafted.items()}
    return [f"{pair.replace(' -> ', '→')} {percent(rate)}{shares.get(pair, '')}" for pair, rate in acceptance.items()]


def rate(per_second: float) -> str:
    """Return tokens per second such as `61/s`, with a decimal below 10."""
    return f"{per_second:,.0f}/s" if per_second >= 9.95 else f"{per_second:.1f}/s"


def size(count: int) -> str:
    """Return bytes in decimal units, as data sheets give them: `12.3 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Return `120 ms`, `3.4 s`, `51 min` or `5.5 h`."""
    if seconds < 1000:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def about(seconds: float) -> str:
    """Return a predicted time, which is not exact: `about 40 s`, `about 4 min` or `about 3.1 h`."""
    if seconds < 60:
        return f"about {math.ceil(seconds)} s"
    return f"about {math.ceil(seconds / 60)} min" if seconds < 2 * 3600 else f"about {seconds / 3600:.1f} h"


def time_left(seconds: float) -> str:
    """Return `0:06 left`, with minutes and seconds, or `3.1 h left`."""
    whole = math.ceil(seconds)
    return f"{whole // 60}:{whole % 60:02d} left" if whole < 2 * 3600 else f"{whole / 3600:.1f} h left"


def milliseconds(seconds: float) -> str:
    """Return the milliseconds without a unit, with a decimal below 10."""
    return f"{seconds * 1000:.1f}" if seconds < 0.01 else f"{seconds * 1000:.0f}"


def percent(fraction: float) -> str:
    """Return `83 %`."""
    return f"{100 * fraction:.0f} %"


def gained(speedup: float) -> str:
    """Return `about 1.4 times plain decoding`; "" where it is as fast."""
    times = f"{speedup:.1f}" if speedup < 9.95 else f"{speedup:.0f}"
    return "" if times == "1.0" else f"about {times} times plain decoding"
