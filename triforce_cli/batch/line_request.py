"""The request of one line, with the settings of the command where the line has none of its own."""

from __future__ import annotations

import secrets
from dataclasses import replace

from offload.errors import PromptError

from ..distributed.rank import broadcast
from ..options.declarations import AUTO
from ..run.model_request import ModelRequest
from .request import LineRequest


def opened_for(opened: ModelRequest, line: LineRequest) -> ModelRequest:
    """Return the command's request with the options of a line. Raises PromptError, SettingsError.

    Where neither the command nor the line gives a seed, each line gets its own: equal prompts have different answers.
    """
    request = opened.request
    system = request.system if line.system is None else line.system
    raw = request.raw if line.raw is None else line.raw
    if raw and system is not None:
        raise PromptError("raw and system contradict each other", "raw uses no chat template, which system needs")
    think = request.think if line.think is None else line.think
    if raw and line.think not in (None, AUTO):
        raise PromptError("raw and think contradict each other", "raw uses no chat template, which think needs")
    group = opened.request.group
    settings = opened.settings.overridden(line.options, lambda: broadcast(group, lambda: secrets.randbits(32)))
    request = replace(request, settings=settings, system=system, raw=raw, think=think)
    return replace(opened, request=request, sampling=settings.sampling(opened.model.sampling))
