"""Where drafts are accepted: by position in the draft, and by position in the answer. Imports no torch."""

from collections.abc import Iterable, Iterator, Sequence

from offload.events import Event, Speculated, Tokens
from offload.level_metrics import FULL

PART = 16  # tokens of the answer that are counted together
Counts = list[list[int]]  # for each position: tokens that were verified, and those that were accepted


class Positions:
    """Counts the drafted tokens that the full cache verifies, from the events of a run.

    A token behind a rejected one is not verified. Of a tree, the accepted path counts, and its depth.

    Attributes:
        in_draft: by position in the draft.
        in_answer: by the position in the answer at which the draft begins, in parts of PART tokens.
    """

    def __init__(self) -> None:
        self.in_draft: Counts = []
        self.in_answer: Counts = []
        self._drafted: dict[str, tuple[int, int]] = {}
        self._emitted = 0

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """Observe each event, and yield it."""
        for event in events:
            if isinstance(event, Speculated):
                self._observe(event)
            elif isinstance(event, Tokens):
                self._emitted += len(event.ids)
            yield event

    def _observe(self, event: Speculated) -> None:
        for level in event.levels:
            if level.verifier == FULL:
                before = self._drafted.get(level.drafter, (0, 0))
                self._drafted[level.drafter] = now = level.drafted, level.accepted
                self._count(now[0] - before[0], now[1] - before[1])

    def _count(self, drafted: int, accepted: int) -> None:
        verified = min(accepted + 1, drafted)
        for position in range(verified):
            _add(self.in_draft, position, 1, int(position < accepted))
        if verified:
            _add(self.in_answer, self._emitted // PART, verified, accepted)


def _add(counts: Counts, position: int, verified: int, accepted: int) -> None:
    counts += [[0, 0] for _ in range(position + 1 - len(counts))]
    counts[position][0] += verified
    counts[position][1] += accepted


def summed(several: Iterable[Sequence[Sequence[int]]]) -> Counts:
    """Return the counts of several runs together."""
    found: Counts = []
    for counts in several:
        for position, (verified, accepted) in enumerate(counts):
            _add(found, position, verified, accepted)
    return found
