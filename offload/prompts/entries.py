"""The prompts that a folder holds, as people think of them: a document and the questions about it are one entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

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
    stored: Stored
    header: Header


def entries(folder: PromptFolder) -> list[Entry]:
    """What is stored, the latest used first. Files that cannot be read are left out."""
    blocks = {(block.stored.path.parent, block.header.key): block for block in _read(folder)}
    parents = {(folder, block.header.parent) for (folder, _), block in blocks.items()}
    leaves = sorted((key for key in blocks if key not in parents), key=lambda key: -blocks[key].stored.index)
    owner: dict[tuple, int] = {}  # of each block, the number of its group
    groups: list[list[list[_Block]]] = []  # chains, the longest first
    for leaf in leaves:
        chain = list(_chain(blocks, leaf))
        common = [number for block in chain if (number := owner.get(_key(block))) is not None]
        if 2 * len(common) > len(chain):
            number = common[0]
        else:
            number = len(groups)
            groups.append([])
        groups[number].append(chain)
        for block in chain:
            owner.setdefault(_key(block), number)
    return sorted((_entry(folder, group) for group in groups), key=lambda entry: -entry.used)


def _read(folder: PromptFolder) -> Iterator[_Block]:
    for stored in folder.blocks():
        with suppress(FileNotFoundError, UnusableBlock):
            yield _Block(stored, read_header(stored.path))


def _key(block: _Block) -> tuple:
    return block.stored.path.parent, block.header.key


def _chain(blocks: dict[tuple, _Block], key: tuple) -> Iterator[_Block]:
    """A block and those before it, from the last to the first."""
    while (block := blocks.get(key)) is not None:
        yield block
        key = key[0], block.header.parent


def _entry(folder: PromptFolder, chains: list[list[_Block]]) -> Entry:
    blocks = {_key(block): block for chain in chains for block in chain}
    stored = tuple(block.stored for block in blocks.values())
    last = chains[0][0]
    return Entry(
        id=last.header.key[:8],
        model=last.header.model,
        label=last.header.label,
        tokens=(last.stored.index + 1) * TOKENS,
        prompts=len(chains),
        size=sum(block.size for block in stored),
        created=min(block.header.created for block in blocks.values()),
        used=max(block.used for block in stored),
        hits=sum(folder.hits(block.path) for block in stored),
        blocks=stored,
    )
