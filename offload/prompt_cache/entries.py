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


@dataclass(slots=True)
class _Group:
    """The prompts of one entry: the last block of each, the longest prompt's first, and all of their blocks."""

    ends: list[_Block] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)


def entries(folder: PromptFolder) -> list[Entry]:
    """Return the entries of a folder, most recently used first. Unreadable files are left out."""
    blocks = _read(folder)
    parents = {block.parent for block in blocks.values()}
    ends = sorted((block for block in blocks.values() if block.name not in parents), key=lambda block: -block.index)
    groups: list[_Group] = []
    owner: dict[_Name, _Group] = {}
    for end in ends:
        new = []
        for block in _chain(blocks, end):
            if (group := owner.get(block.name)) is not None and 2 * (block.index + 1) > end.index + 1:
                break  # the group has all earlier blocks too
            new.append(block)
        else:
            groups.append(group := _Group())
        group.ends.append(end)
        group.blocks += new
        for block in new:
            owner.setdefault(block.name, group)
    return sorted(map(_entry, groups), key=lambda entry: -entry.used)


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


def _entry(group: _Group) -> Entry:
    files = tuple(each for block in group.blocks for each in block.files)
    last = group.ends[0]
    return Entry(
        id=last.header.key[:8],
        model=last.header.model,
        label=last.header.label,
        kv=last.header.kv,
        tokens=(last.index + 1) * TOKENS,
        prompts=len(group.ends),
        size=sum(each.size for each in files),
        created=min(block.header.created for block in group.blocks),
        used=max(each.used for each in files),
        blocks=files,
    )
