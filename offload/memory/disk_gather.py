"""Reads of selected grains from pages on disk: page by page, or one by one where few of a page are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .link import Pair
from .tiers import Tiers

SMALL_READ_BYTES = 64 * 1024  # that a disk reads in sequence in the time of one small read
_BATCH_BYTES = 16 * 2**20  # of pages in memory at once


def read_grains(tiers: Tiers[Any], layer: Tensor, page: Tensor, head: Tensor, grain: Tensor) -> Tensor:
    """Return grains of pages on disk, `[n, count, ...]` as `PageFormat.read_grains` takes them.

    All indices are `[n, count]`. Raises TransferFailed.
    """
    pages, shape = tiers.pages, layer.shape
    grains = tiers.format.grains(torch.empty((1, 1), dtype=pages.dtype).expand(1, pages.shape[2]))  # for its shape
    heads, each, *numbers = grains.shape[1:]
    picked = torch.empty((layer.numel(), *numbers), dtype=pages.dtype)
    within, keys = (head * each + grain).flatten(), (layer * pages.shape[1] + page).flatten()
    is_near = layer.flatten() < pages.memory_layers
    if pages.memory_layers:
        near = tiers.format.grains(pages.memory).flatten(0, 3)
        picked[is_near] = near[keys[is_near] * heads * each + within[is_near]]
    groups = [(key, at) for key, at in _by_page(keys) if not is_near[at[0]]]
    few = pages.page_bytes // SMALL_READ_BYTES
    _read_small(tiers, [(key, at) for key, at in groups if len(at) < few], within, picked)
    _read_whole(tiers, [(key, at) for key, at in groups if len(at) >= few], within, picked, heads * each)
    return picked.unflatten(0, shape)


def _by_page(keys: Tensor) -> list[tuple[int, Tensor]]:
    """Return each page's key with the indices of its grains, in the order of the file."""
    order = torch.argsort(keys, stable=True)
    found, counts = torch.unique_consecutive(keys[order], return_counts=True)
    return list(zip(found.tolist(), order.split(counts.tolist()), strict=True))


def _read_small(tiers: Tiers[Any], groups: list[tuple[int, Tensor]], within: Tensor, picked: Tensor) -> None:
    """Read grains one by one."""
    pages, pairs = tiers.pages, []
    for key, at in groups:
        layer, page = divmod(key, pages.shape[1])
        for index in at.tolist():
            size = picked[index].nbytes
            pairs.append((picked[index], pages.part(layer, page, int(within[index]) * size, size)))
    _copy(tiers, pairs)


def _read_whole(tiers: Tiers[Any], groups: list[tuple[int, Tensor]], within: Tensor, picked: Tensor, each: int) -> None:
    """Read whole pages, some at once, and pick their grains."""
    pages = tiers.pages
    if not groups:
        return
    memory = pages.new_memory(min(len(groups), max(_BATCH_BYTES // pages.page_bytes, 1)))
    for start in range(0, len(groups), len(memory)):
        some = groups[start : start + len(memory)]
        _copy(tiers, [(row, pages[divmod(key, pages.shape[1])]) for row, (key, _) in zip(memory, some, strict=False)])
        for row, (_, at) in zip(memory, some, strict=False):
            picked[at] = row.view(each, *picked.shape[1:])[within[at]]


def _copy(tiers: Tiers[Any], pairs: list[Pair]) -> None:
    if pairs:
        tiers.link.wait(tiers.link.copy(pairs))
