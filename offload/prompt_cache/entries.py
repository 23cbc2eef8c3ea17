"""Entries of the prompt cache, as `cache list` shows them: a document and the questions about it are one entry."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from .fingerprint import TOKENS
from .folder import Header, PromptFolder, Stored, UnusableBlock, read_header

_Name = tuple[str, str]  # of a block: folder and key


@dataclass(frozen=True, slots=True)
class Entry:
    """Prompts that share more than half of their blocks. Times in seconds since the epoch."""

    id: str
    model: str
    label: str
    kv: str  # the format of keys and values
    tokens: int  # of the longest prompt
    prompts: int
    size: int  # bytes
    created: float
    used: float
    blocks: tuple[Stored, ...]


@dataclass(slots=True)
class _Block:
    """A block and its files: one per rank, and the states behind it."""

    name: _Name
    header: Header
    files: list[Stored] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.files[0].index

    @property
    def parent(self) -> _Name:
        return self.name[0], self.header.parent


def entries(folder: PromptFolder) -> list[Entry]:
    """Return the entries of a folder, most recently used first. Unreadable files are left out."""
    blocks = _read(folder)
    parents = {block.parent for block in blocks.values()}
    ends = sorted((block for block in blocks.values() if block.name not in parents), key=lambda block: -block.index)
    groups: list[tuple[list[_Block], list[_Block]]] = []  # of each entry: its prompts' last blocks, and all its blocks
    owner: dict[_Name, int] = {}  # the first group that has a block
    for end in ends:
        new: list[_Block] = []
        number = len(groups)
        for block in _chain(blocks, end):
            other = owner.get(block.name)
            if other is not None and 2 * (block.index + 1) > end.index + 1:
                number = other  # which has all earlier blocks too
                break
            new.append(block)
        if number == len(groups):
            groups.append(([], []))
        groups[number][0].append(end)
        groups[number][1].extend(new)
        for block in new:
            owner.setdefault(block.name, number)
    return sorted((_entry(*group) for group in groups), key=lambda entry: -entry.used)


def _read(folder: PromptFolder) -> dict[_Name, _Block]:
    blocks: dict[_Name, _Block] = {}
    for stored in folder.blocks():
        with suppress(OSError, UnusableBlock):
            header = read_header(stored.path)
            name = str(stored.path.parent), header.key
            blocks.setdefault(name, _Block(name, header)).files.append(stored)
    return blocks


def _chain(blocks: dict[_Name, _Block], block: _Block | None) -> Iterator[_Block]:
    """Yield a block and its predecessors, last to first."""
    while block is not None:
        yield block
        before = blocks.get(block.parent)
        block = before if before is not None and before.index < block.index else None


def _entry(ends: list[_Block], blocks: list[_Block]) -> Entry:
    """Return the entry of prompts with these last blocks, the longest prompt's first, and these blocks in all."""
    files = tuple(stored for block in blocks for stored in block.files)
    last, header = ends[0], ends[0].header
    return Entry(
        *(header.key[:8], header.model, header.label, header.kv, (last.index + 1) * TOKENS, len(ends)),
        size=sum(stored.size for stored in files),
        created=min(block.header.created for block in blocks),
        used=max(stored.used for stored in files),
        blocks=files,
    )
