"""What the engine says while it works, in the order in which it says it: prefill, tokens, finished.

Events carry tokens, not text; `text.py` adds `Text` events. Every event is complete in itself and cheap to make.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`done` of `total` prompt tokens are in the KV cache."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly emitted tokens, in order: one from plain decoding, a run of them from a verification."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is final: whole characters, no part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `reason` is "eos", "stop" (a stop string) or "length"."""

    reason: str


Event = Prefilled | Tokens | Text | Finished
