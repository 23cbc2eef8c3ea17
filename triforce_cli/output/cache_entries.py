"""The entries of the prompt cache as text."""

from collections.abc import Sequence

from rich.text import Text

from offload.prompt_cache.entries import Entry
from offload.prompt_cache.folder import PromptFolder
from offload.settings.kv_formats import BF16
from offload.units import size_text

from .tables import Column, lines_text, table
from .text_layout import visible

_COLUMNS = (
    Column("id", style="cyan"),
    Column("tokens", right=True),
    Column("size", right=True),
    Column("kv", dropped=1),
    Column("age", right=True, dropped=4),
    Column("used", right=True, dropped=2),
    Column("model", dropped=5, least=12),
    Column("prompt", least=16),
)
_STEPS = ((604800, "w"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def entries_table(entries: Sequence[Entry], folder: PromptFolder, now: float, width: int | None) -> Text:
    """Return a line for each entry, and one for the whole cache, in `width` columns if that is given.

    The format of keys and values is shown where any are quantised.
    """
    blocks, listed = list(folder.blocks()), {block.path for entry in entries for block in entry.blocks}
    used, limit = size_text(sum(block.size for block in blocks)), size_text(folder.limit)
    total = f"{used} of {limit} in {visible(str(folder.path))}"
    if unknown := sum(block.size for block in blocks if block.path not in listed):
        total += f", {size_text(unknown)} of it damaged or of another version (triforce cache clear removes all)"
    has_formats = any(entry.kv != BF16 for entry in entries)
    shown = [number for number, column in enumerate(_COLUMNS) if column.name != "kv" or has_formats]
    rows = [[_row(entry, now)[number] for number in shown] for entry in entries]
    text = table([_COLUMNS[number] for number in shown], rows, width) if entries else Text()
    return text.append_text(lines_text([total], width))


def _row(entry: Entry, now: float) -> tuple[str, ...]:
    """Return the cells of _COLUMNS."""
    ages = (ago(now - then) for then in (entry.created, entry.used))
    texts = (visible(entry.model), visible(entry.label))
    return (entry.id, f"{entry.tokens:,}", size_text(entry.size), entry.kv, *ages, *texts)


def ago(seconds: float) -> str:
    """Return an age such as `3 d` or `12 min`, in the largest unit of which there is at least one."""
    return next((f"{int(seconds // size)} {name}" for size, name in _STEPS if seconds >= size), "now")
