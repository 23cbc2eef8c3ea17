"""The prompt cache: opened for a run, and its entries as text."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from offload.errors import Degraded
from offload.prompt_cache.entries import Entry
from offload.prompt_cache.fingerprint import LEAST
from offload.prompt_cache.folder import PromptFolder
from offload.settings.config import Caching
from offload.settings.kv_formats import BF16
from offload.settings.method_sizes import forgets
from offload.system.machine import default_home
from offload.units import counted, size_text

from ..options.settings import Settings
from ..output.cursor import visible
from ..output.tables import Column, table, wrapped

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel
    from offload.prompt_cache.prefill import PromptCache

LABEL = 240  # characters of a prompt from which its label is made; most of them may be blank
_SHOWN = 60  # characters of a label


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


def open_prompt_cache(model: OpenModel, settings: Settings, home: Path | None) -> PromptCache | None:
    """Return the prompt cache; None if it is off, and, with a warning, if any rank cannot open it."""
    caching = settings.caching
    if caching.cache is False or not caching.cache_limit or forgets(settings.speculation):
        return None
    prompt_cache, error = _open(model, caching, home)
    errors = model.group.collect(error)
    if any(errors):
        rank, reason = next((rank, each) for rank, each in enumerate(errors) if each)
        where = f"rank {rank}: " if len(errors) > 1 else ""
        warnings.warn(f"prompts are not cached: {where}{reason}", Degraded, stacklevel=2)
        return None
    return prompt_cache


def _open(model: OpenModel, caching: Caching, home: Path | None) -> tuple[PromptCache | None, str]:
    """Return the cache and "", or None and the reason."""
    folder = prompt_folder(home, caching.cache_limit)
    try:
        cache = model.prompt_cache(folder, 0 if caching.cache else LEAST)
        _warn_of_strangers(folder.path)
        return cache, ""
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return None, f"{error.strerror or error}{where}"


_KV = Column("kv", dropped=1)
_COLUMNS = (
    Column("id", style="cyan"),
    Column("tokens", right=True),
    Column("size", right=True),
    _KV,
    Column("age", right=True, dropped=4),
    Column("used", right=True, dropped=2),
    Column("model", dropped=5, least=12),
    Column("prompt", least=16),
)
_STEPS = ((604800, "w"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def entries_table(found: Sequence[Entry], folder: PromptFolder, now: float, width: int | None) -> Text:
    """Return a line for each entry, and one for the whole cache, in `width` columns if that is given.

    The format of keys and values is shown where any are quantised.
    """
    columns = [column for column in _COLUMNS if column is not _KV or any(entry.kv != BF16 for entry in found)]
    blocks, listed = list(folder.blocks()), {block.path for entry in found for block in entry.blocks}
    used, limit = size_text(sum(block.size for block in blocks)), size_text(folder.limit)
    total = f"{used} of {limit} in {visible(str(folder.path))}"
    if unknown := sum(block.size for block in blocks if block.path not in listed):
        total += f", {size_text(unknown)} of it damaged or of another version (triforce cache clear removes all)"
    lines = [total] if width is None else wrapped(total, width)
    rows = [[row[column] for column in columns] for row in (_row(entry, now) for entry in found)]
    text = table(columns, rows, width) if found else Text()
    return text.append("".join(f"{line}\n" for line in lines))


def _row(entry: Entry, now: float) -> dict[Column, str]:
    ages = (ago(now - then) for then in (entry.created, entry.used))
    texts = (visible(entry.model), visible(entry.label))
    cells = (entry.id, f"{entry.tokens:,}", size_text(entry.size), entry.kv, *ages, *texts)
    return dict(zip(_COLUMNS, cells, strict=True))


def ago(seconds: float) -> str:
    """Return an age such as `3 d` or `12 min`, in the largest unit of which there is at least one."""
    for size, name in _STEPS:
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return "now"


def details(entry: Entry, now: float) -> str:
    rows = {
        "id": entry.id,
        "model": visible(entry.model),
        "prompt": visible(entry.label),
        "kv": entry.kv,
        "tokens": f"{entry.tokens:,}",
        "prompts": f"{entry.prompts:,}",
        "size": f"{size_text(entry.size)} in {counted(len(entry.blocks), 'block')}",
        "created": _moment(entry.created, now),
        "used": _moment(entry.used, now),
        "folder": str(entry.blocks[0].path.parent),
    }
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows.items())


def _moment(then: float, now: float) -> str:
    age = ago(now - then)
    return f"{datetime.fromtimestamp(then):%Y-%m-%d %H:%M} ({age if age == 'now' else f'{age} ago'})"
