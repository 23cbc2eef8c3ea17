"""The result of `--verify` as a line of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.units import counted


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
