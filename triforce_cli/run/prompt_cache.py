"""The prompt cache that a run uses, as its settings have it."""

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
    from offload.loader import OpenModel
    from offload.prompt_cache.prefill import PromptCache

LABEL = 240  # characters of a prompt by which a person knows it again; most of them may be blank
_SHOWN = 60


def prompt_folder(home: Path | None, limit: int) -> PromptFolder:
    """Where prompts are kept, below triforce's cache folder."""
    return PromptFolder((home or default_home()) / "prompts", limit)


def beginning(text: str) -> str:
    """Of a prompt, so that a person knows it again."""
    return " ".join(text[:LABEL].split())[:_SHOWN]


def prompts_for(opened: OpenModel, settings: Settings, home: Path | None) -> PromptCache | None:
    """What remembers prompts; None if that is not wanted, or cannot be for every rank: then with a warning."""
    caching = settings.caching
    if caching.cache is False or caching.cache_limit == 0:
        return None
    prompts, trouble = _open(opened, prompt_folder(home, caching.cache_limit), 0 if caching.cache else LEAST)
    troubles = opened.group.collect(trouble)
    if any(troubles):
        rank, reason = next((rank, each) for rank, each in enumerate(troubles) if each)
        where = f"rank {rank}: " if len(troubles) > 1 else ""
        warnings.warn(f"prompts are not kept: {where}{reason}", Degraded, stacklevel=2)
        return None
    return prompts


def _open(opened: OpenModel, folder: PromptFolder, least: int) -> tuple[PromptCache | None, str]:
    """The cache, or why there is none."""
    try:
        return opened.prompt_cache(folder, least), ""
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return None, f"{error.strerror or error}{where}"
