"""What the engine says while it works, in the order in which it says it: prefill, tokens, finished.

Events carry tokens, not text; `text.py` adds `Text` events. Every event is complete in itself and cheap to make.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`done` of `total` prompt tokens are in the KV cache.

    `restored`: those since the previous event were read from a prompt cache instead of being run.
    """

    done: int
    total: int
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """The end of restoring from a prompt cache: prompt tokens that need not be run, bytes read, and seconds."""

    tokens: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DraftPrefilled:
    """`done` of `total` prompt tokens that a draft model reads are in its cache, after the prefill of the target."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly emitted tokens, in order: one from plain decoding, a run of them from a verification."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transferred:
    """What has gone over the link so far, both ways, in bytes, and the seconds in which it was busy."""

    bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is final: whole characters, no part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class LevelStatistics:
    """What one drafter did for one verifier so far. `drafter` is "none" for plain steps; times in seconds.

    Drafted tokens behind a rejected one are never judged.
    """

    drafter: str
    verifier: str
    verifications: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate: accepted / judged tokens."""
        return self.accepted / self.judged if self.judged else None

    def plus(self, drafted: int, accepted: int, draft_s: float, verify_s: float) -> LevelStatistics:
        """With one more verification."""
        return LevelStatistics(
            self.drafter,
            self.verifier,
            self.verifications + 1,
            self.drafted + drafted,
            self.judged + min(accepted + 1, drafted),
            self.accepted + accepted,
            self.draft_s + draft_s,
            self.verify_s + verify_s,
        )


@dataclass(frozen=True, slots=True)
class Speculated:
    """How speculation stands after a verification; `levels` from the target's downwards. `using` is what drafted it."""

    method: str
    using: str
    levels: tuple[LevelStatistics, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `reason` is "eos", "stop" (a stop string) or "length"."""

    reason: str


Event = Prefilled | Restored | DraftPrefilled | Tokens | Speculated | Transferred | Text | Finished
