"""The prompts that a folder holds, as people think of them: a document and the questions about it are one entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .folder import PromptFolder, Stored
from .header import Header, UnusableBlock, read_header
from .identity import TOKENS


@dataclass(frozen=True, slots=True)
class Entry:
    """Prompts that have more than half of their blocks in common. Times in seconds since the epoch."""

    id: str
    model: str
    label: str
    tokens: int  # of the longest of them
    prompts: int
    size: int  # bytes
    created: float
    used: float
    hits: int
    blocks: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """A block and its files: one for each part."""

    header: Header
    files: list[Stored]

    @property
    def name(self) -> tuple[Path, str]:
        return self.files[0].path.parent, self.header.key

    @property
    def index(self) -> int:
        return self.files[0].index


def entries(folder: PromptFolder) -> list[Entry]:
    """What is stored, the latest used first. Files that cannot be read are left out."""
    blocks = _read(folder)
    parents = {(path, block.header.parent) for (path, _), block in blocks.items()}
    leaves = sorted((name for name in blocks if name not in parents), key=lambda name: -blocks[name].index)
    owner: dict[tuple[Path, str], int] = {}  # of each block, the number of its group
    groups: list[list[list[_Block]]] = []  # chains, the longest first
    for leaf in leaves:
        chain = list(_chain(blocks, leaf))
        common = [number for block in chain if (number := owner.get(block.name)) is not None]
        if 2 * len(common) > len(chain):
            number = common[0]
        else:
            number = len(groups)
            groups.append([])
        groups[number].append(chain)
        for block in chain:
            owner.setdefault(block.name, number)
    return sorted((_entry(folder, group) for group in groups), key=lambda entry: -entry.used)


def _read(folder: PromptFolder) -> dict[tuple[Path, str], _Block]:
    blocks: dict[tuple[Path, str], _Block] = {}
    for stored in folder.blocks():
        with suppress(FileNotFoundError, UnusableBlock):
            block = _Block(read_header(stored.path), [])
            blocks.setdefault((stored.path.parent, block.header.key), block).files.append(stored)
    return blocks


def _chain(blocks: dict[tuple[Path, str], _Block], name: tuple[Path, str]) -> Iterator[_Block]:
    """A block and those before it, from the last to the first."""
    while (block := blocks.get(name)) is not None:
        yield block
        name = name[0], block.header.parent


def _entry(folder: PromptFolder, chains: list[list[_Block]]) -> Entry:
    blocks = {block.name: block for chain in chains for block in chain}
    stored = tuple(each for block in blocks.values() for each in block.files)
    last = chains[0][0]
    return Entry(
        id=last.header.key[:8],
        model=last.header.model,
        label=last.header.label,
        tokens=(last.index + 1) * TOKENS,
        prompts=len(chains),
        size=sum(each.size for each in stored),
        created=min(block.header.created for block in blocks.values()),
        used=max(each.used for each in stored),
        hits=sum(max(folder.hits(each.path) for each in block.files) for block in blocks.values()),
        blocks=stored,
    )
