"""How many sequences of a run fit the memory together."""

from dataclasses import replace

from offload.errors import OutOfMemory, SettingsError
from offload.settings.config import Placement
from offload.units import counted, size_text

from ..options.declarations import AUTO
from .opened_request import OpenedRequest

MOST = 8  # that `auto` runs together: beyond, a pass of one row each is bound by arithmetic on a CPU


def check_parallel(wanted: int | str, opened: OpenedRequest, tokens: int, sequences: int | None = None) -> int:
    """Return how many sequences of up to `tokens` run together.

    There are `sequences` of them, None if that is not known yet. Raises SettingsError where only one can run at a time,
    OutOfMemory if as many as are wanted do not fit.
    """
    reason = _reason_to_run_alone(opened)
    if wanted == 1 or (wanted == AUTO and reason):
        return 1
    if reason:
        raise SettingsError(f"--parallel {wanted} cannot be used with {reason}", "leave one of the two out")
    spare = int(opened.request.verify)  # plain decoding, to compare, has caches of its own
    fitting = max(fitting_sequences(opened, tokens) - spare, 1)
    most = MOST if wanted == AUTO else int(wanted)
    most = most if sequences is None else min(most, sequences)
    if most > fitting and wanted != AUTO:
        one, two = (opened.model.estimate(tokens, count).total for count in (1, 2))
        limit = _limit(opened)
        raise OutOfMemory(
            f"not enough memory for {most} sequences of {counted(tokens, 'token')}: about {size_text(one)} for the "
            f"first and {size_text(two - one)} for each further one, in "
            + ("the free memory" if limit is None else size_text(limit)),
            f"use --parallel {fitting}, or shorter texts",
        )
    return min(most, fitting)


def fitting_sequences(opened: OpenedRequest, tokens: int) -> int:
    """Return how many sequences of `tokens` fit the memory beside the weights, at least 1.

    Each is counted with keys and values of its own, also of a beginning that it shares with others.
    """
    return max(opened.model.fitting_sequences(tokens, _limit(opened)), 1)


def _limit(opened: OpenedRequest) -> int | None:
    return opened.settings.memory_limit(opened.model.device.type)


def _reason_to_run_alone(opened: OpenedRequest) -> str:
    """Return why only one sequence can run at a time; "" if several can."""
    if opened.model.group.size > 1:
        return "several ranks"
    placement = replace(opened.settings.placement, memory=None, host_memory=None, experts="auto")
    return "" if placement in (Placement(), Placement(offload="none")) else "offloaded keys and values"
