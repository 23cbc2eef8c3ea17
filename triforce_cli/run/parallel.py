"""How many sequences run together: as many as were asked for, or as the memory allows."""

from __future__ import annotations

from dataclasses import replace

from offload.api.opened_model import OpenModel
from offload.errors import OutOfMemory, SettingsError
from offload.settings.config import Placement
from offload.units import counted, size_text

from ..options.declarations import AUTO
from ..options.settings import Settings
from .model_request import ModelRequest
from .prompt_cache import memory_limit

MOST = 8  # that `auto` runs together: beyond, a pass of one row each is bound by arithmetic on a CPU


def fitting_sequences(opened: ModelRequest, tokens: int) -> int:
    """Return how many sequences of `tokens` fit the memory beside the weights, at least 1.

    Each is counted with keys and values of its own, also of a beginning that it shares with others.
    """
    return _fitting(opened.model, opened.settings, tokens)


def check_parallel(wanted: int | str, opened: ModelRequest, tokens: int, sequences: int | None = None) -> int:
    """Return how many sequences of up to `tokens` run together.

    There are `sequences` of them, None if that is not known yet. Raises SettingsError where only one can run at a time,
    OutOfMemory if as many as are wanted do not fit.
    """
    reason = _alone(opened)
    if wanted == 1 or (wanted == AUTO and reason):
        return 1
    if reason:
        raise SettingsError(f"--parallel {wanted} cannot be used with {reason}", "leave one of the two out")
    spare = 1 if opened.request.verify else 0  # plain decoding, to compare, has caches of its own
    most = MOST if wanted == AUTO else wanted
    most = most if sequences is None else min(most, sequences)
    if wanted == AUTO:
        return min(most, max(fitting_sequences(opened, tokens) - spare, 1))
    check_sequences(opened.model, opened.settings, tokens, most, "--parallel", spare)
    return most


def check_sequences(
    model: OpenModel, settings: Settings, tokens: int, sequences: int, option: str, spare: int = 0
) -> None:
    """Raise OutOfMemory with the numbers if so many sequences of `tokens` do not fit, beside `spare` further ones.

    `option` is what asks for them.
    """
    fitting = max(_fitting(model, settings, tokens) - spare, 1)
    if sequences <= fitting:
        return
    one, two = (model.estimate(tokens).for_sequences(count).total for count in (1, 2))
    limit = memory_limit(model, settings, tokens)
    room = "the free memory" if limit is None else size_text(limit)
    raise OutOfMemory(
        f"not enough memory for {sequences} sequences of {counted(tokens, 'token')}: about {size_text(one)} "
        f"for the first and {size_text(two - one)} for each further one, in {room}",
        f"use {option} {fitting}, or shorter texts",
    )


def _alone(opened: ModelRequest) -> str:
    """Return why only one sequence can run at a time; "" if several can."""
    if opened.model.group.size > 1:
        return "several ranks"
    placement = replace(opened.settings.placement, memory=None, host_memory=None, experts="auto", expert_layers=None)
    return "" if placement in (Placement(), Placement(offload="none")) else "offloaded keys and values"


def _fitting(model: OpenModel, settings: Settings, tokens: int) -> int:
    return max(model.fitting_sequences(tokens, memory_limit(model, settings, tokens)), 1)
