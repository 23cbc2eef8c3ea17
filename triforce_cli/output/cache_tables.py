"""The prompt cache as text: a table of its entries, and the details of one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.text import Text

from offload.prompt_cache.entries import Entry
from offload.prompt_cache.folder import PromptFolder
from offload.settings.config import EXACT
from offload.units import counted, size_text

from .cursor import visible
from .tables import Column, table, wrapped

_KV = Column("kv", dropped=1)
_COLUMNS = (
    Column("id", style="cyan"),
    Column("tokens", right=True),
    Column("size", right=True),
    _KV,
    Column("age", right=True, dropped=4),
    Column("used", right=True, dropped=2),
    Column("hits", right=True, dropped=3),
    Column("model", dropped=5, least=12),
    Column("prompt", least=16),
)
_STEPS = ((604800, "w"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def entries_table(found: Sequence[Entry], folder: PromptFolder, now: float, width: int | None) -> Text:
    """Return a line for each entry, and one for the whole cache, in `width` columns if that is given.

    The format of keys and values is shown where any are quantised.
    """
    columns = [column for column in _COLUMNS if column is not _KV or any(entry.kv != EXACT for entry in found)]
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
    cells = (entry.id, f"{entry.tokens:,}", size_text(entry.size), entry.kv, *ages, str(entry.hits), *texts)
    return dict(zip(_COLUMNS, cells, strict=True))


def ago(seconds: float) -> str:
    """Return an age such as `3 d` or `12 min`, in the largest unit of which there is at least one."""
    for size, name in _STEPS:
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return "now"


def details(entry: Entry, now: float) -> str:
    """Return the details of one entry, one a line."""
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
        "hits": f"{entry.hits:,}",
        "folder": str(entry.blocks[0].path.parent),
    }
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows.items())


def _moment(then: float, now: float) -> str:
    age = ago(now - then)
    return f"{datetime.fromtimestamp(then):%Y-%m-%d %H:%M} ({age if age == 'now' else f'{age} ago'})"
