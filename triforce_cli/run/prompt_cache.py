"""The prompt cache of a run: its folder, and how it is opened."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import Degraded
from offload.prompt_cache.fingerprint import LEAST
from offload.prompt_cache.folder import PromptFolder
from offload.settings.method_sizes import forgets
from offload.system.machine import default_home
from offload.system.platform import others_can_write

from ..options.settings import Settings

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel
    from offload.prompt_cache.prompt import PromptCache

LABEL = 240  # characters of a prompt from which its label is made; most of them may be blank
_SHOWN = 60  # characters of a label


def prompt_folder(home: Path | None, limit: int) -> PromptFolder:
    """Return the folder of the prompt cache, below triforce's cache folder."""
    return PromptFolder((home or default_home()) / "prompts", limit)


def short_label(text: str) -> str:
    """Return the beginning of a prompt in one line, for lists."""
    return " ".join(text[:LABEL].split())[:_SHOWN]


def open_prompt_cache(model: OpenModel, settings: Settings, home: Path | None) -> PromptCache | None:
    """Return the prompt cache; None if it is off, and, with a warning, if any rank cannot open it."""
    caching, prompts, reason = settings.caching, None, ""
    if caching.cache is False or not caching.cache_limit or forgets(settings.speculation):
        return None
    folder = prompt_folder(home, caching.cache_limit)
    try:
        prompts = model.prompt_cache(folder, 0 if caching.cache else LEAST)
        _warn_of_strangers(folder.path)
    except OSError as error:
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    reasons = model.group.collect(reason)
    for rank, reason in enumerate(reasons):
        if reason:
            where = f"rank {rank}: " if len(reasons) > 1 else ""
            warnings.warn(f"prompts are not cached: {where}{reason}", Degraded, stacklevel=2)
            return None
    return prompts


def _warn_of_strangers(path: Path) -> None:
    """Warn of a folder in which other users can put blocks, which would be believed. Raises OSError."""
    if others_can_write(path):
        text = f"other users can write to {path}, and so change answers; hint: chmod 700 on a folder of your own"
        warnings.warn(text, Degraded, stacklevel=2)
