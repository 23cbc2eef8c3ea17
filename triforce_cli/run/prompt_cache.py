"""Opens the prompt cache of a run."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import Degraded
from offload.prompt_cache.fingerprint import LEAST
from offload.prompt_cache.folder import PromptFolder
from offload.system.machine import default_home
from offload.units import size_text

from ..options.mode_checks import is_cacheable
from ..options.settings import Settings

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel
    from offload.prompt_cache.prefill import PromptCache

LABEL = 240  # characters of a prompt from which its label is made; most of them may be blank
_SHOWN = 60  # characters of a label
_SMALL = 4  # buffers for which keys and values are offloaded take no more than 1/4 of the memory


def prompt_folder(home: Path | None, limit: int) -> PromptFolder:
    """Return the folder of the prompt cache, below triforce's cache folder."""
    return PromptFolder((home or default_home()) / "prompts", limit)


def short_label(text: str) -> str:
    """Return the beginning of a prompt in one line, for lists."""
    return " ".join(text[:LABEL].split())[:_SHOWN]


def _warn_of_strangers(path: Path) -> None:
    """Warn of a folder in which other users can put blocks, which would be believed. Raises OSError."""
    if os.name != "posix":
        return
    state = path.stat()
    if state.st_mode & stat.S_IWOTH or (os.geteuid() and state.st_uid not in (0, os.geteuid())):
        text = f"other users can write to {path}, and so change answers; hint: chmod 700 on a folder of your own"
        warnings.warn(text, Degraded, stacklevel=2)


def memory_limit(model: OpenModel, settings: Settings, tokens: int) -> int | None:
    """Return what the limit leaves for sequences of `tokens` beside the buffers of the prompt cache.

    All of it where there are no such buffers, and where not even one sequence fits beside them.
    """
    limit = settings.memory_limit(model.device.type)
    return limit if limit is None else limit - _buffers_within(limit, model, settings, tokens)


def _buffers_within(limit: int, model: OpenModel, settings: Settings, tokens: int) -> int:
    """Return the bytes of the prompt cache's buffers if they fit into the limit beside a sequence; 0 if not.

    Where keys and values may be offloaded, they make room for buffers that are small beside the limit.
    """
    buffers, where = _buffer_bytes(model, settings, tokens), settings.placement
    if where.link_gb_s is not None or where.disk is not None:
        return buffers if buffers <= limit // _SMALL else 0
    return buffers if model.estimate(tokens).total + buffers <= limit else 0


def _buffer_bytes(model: OpenModel, settings: Settings, tokens: int) -> int:
    """Return the bytes of the prompt cache's buffers in the memory that is limited: none on a GPU."""
    is_short = settings.caching.cache is None and tokens < LEAST
    if is_short or model.device.type != "cpu" or not _is_on(settings):
        return 0
    return model.prompt_buffer_bytes


def _is_on(settings: Settings) -> bool:
    return settings.caching.cache is not False and settings.caching.cache_limit > 0 and is_cacheable(settings)


def open_prompt_cache(model: OpenModel, settings: Settings, home: Path | None, tokens: int = 0) -> PromptCache | None:
    """Return the prompt cache for sequences of up to `tokens`.

    None if it is off, and, with a warning, if any rank cannot open it or has no memory for its buffers.
    """
    if not _is_on(settings):
        return None
    prompt_cache, error = _open(model, settings, home, tokens)
    errors = model.group.collect(error)
    if any(errors):
        rank, reason = next((rank, each) for rank, each in enumerate(errors) if each)
        where = f"rank {rank}: " if len(errors) > 1 else ""
        warnings.warn(f"prompts are not cached: {where}{reason}", Degraded, stacklevel=2)
        return None
    return prompt_cache


def _open(model: OpenModel, settings: Settings, home: Path | None, tokens: int) -> tuple[PromptCache | None, str]:
    """Return the cache and "", or None and the reason."""
    limit, buffers = settings.memory_limit(model.device.type), _buffer_bytes(model, settings, tokens)
    if limit is not None and buffers and not _buffers_within(limit, model, settings, tokens):
        return None, f"the {size_text(limit)} that may be used leave no room for {size_text(buffers)} of buffers"
    folder = prompt_folder(home, settings.caching.cache_limit)
    try:
        cache = model.prompt_cache(folder, 0 if settings.caching.cache else LEAST)
        _warn_of_strangers(folder.path)
        return cache, ""
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return None, f"{error.strerror or error}{where}"
