"""Opens the prompt cache of a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import Degraded
from offload.prompt_cache.fingerprint import LEAST
from offload.prompt_cache.folder import PromptFolder
from offload.system import default_home

from ..options.settings import Settings

if TYPE_CHECKING:
    from offload.opened_model import OpenModel
    from offload.prompt_cache.prefill import PromptCache

LABEL = 240  # characters of a prompt from which its label is made; most of them may be blank
_SHOWN = 60  # characters of a label


def prompt_folder(home: Path | None, limit: int) -> PromptFolder:
    """Return the folder of the prompt cache, below triforce's cache folder."""
    return PromptFolder((home or default_home()) / "prompts", limit)


def short_label(text: str) -> str:
    """Return the beginning of a prompt in one line, for lists."""
    return " ".join(text[:LABEL].split())[:_SHOWN]


def open_prompt_cache(model: OpenModel, settings: Settings, home: Path | None) -> PromptCache | None:
    """Return the prompt cache; None if it is off, or if any rank cannot open it, with a warning."""
    caching = settings.caching
    if caching.cache is False or caching.cache_limit == 0:
        return None
    prompt_cache, error = _open(model, prompt_folder(home, caching.cache_limit), 0 if caching.cache else LEAST)
    errors = model.group.collect(error)
    if any(errors):
        rank, reason = next((rank, each) for rank, each in enumerate(errors) if each)
        where = f"rank {rank}: " if len(errors) > 1 else ""
        warnings.warn(f"prompts are not cached: {where}{reason}", Degraded, stacklevel=2)
        return None
    return prompt_cache


def _open(model: OpenModel, folder: PromptFolder, least: int) -> tuple[PromptCache | None, str]:
    """Return the cache and "", or None and the reason."""
    try:
        return model.prompt_cache(folder, least), ""
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return None, f"{error.strerror or error}{where}"
