"""How long the sequences of a static batch wait for each other. Imports no torch."""

from __future__ import annotations

NEGLIGIBLE = 1e-9  # probability


def draft_rounds(acceptance: float, gamma1: int, gamma2: int, sequences: int) -> float:
    """Return the expected rounds until the slowest of some sequences has drafted `gamma2` tokens.

    A round of the lower level drafts `gamma1` tokens, each accepted at the rate, and emits one more than are accepted.
    """
    emitted = [acceptance**count * (1 - acceptance) for count in range(gamma1)] + [acceptance**gamma1]
    drafting, expected = {0: 1.0}, 0.0  # the probability of each number of tokens below gamma2, of one sequence
    while (unfinished := 1 - (1 - min(sum(drafting.values()), 1.0)) ** sequences) > NEGLIGIBLE:
        expected += unfinished
        following: dict[int, float] = {}
        for tokens, probability in drafting.items():
            for accepted, chance in enumerate(emitted):
                if (total := tokens + accepted + 1) < gamma2:
                    following[total] = following.get(total, 0.0) + probability * chance
        drafting = following
    return expected
