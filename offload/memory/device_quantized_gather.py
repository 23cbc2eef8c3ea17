"""Copies selected groups of quantised keys and values from the tier that has them to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.kv_formats import GROUP
from .disk_gather import read_grains
from .disk_pages import DiskPages
from .host_memory import allocator
from .open_pages import OpenPages
from .tiers import QuantizedTiers


def gather_groups(tiers: QuantizedTiers, open_pages: OpenPages, rows: Tensor, groups: Tensor) -> Tensor:
    """Return groups `[n, count, bytes]` on the device: those of number `groups` `[n, count]` in the sequence.

    A row is layer * kv_heads + KV head, `[n]`; the layer counts from the first offloaded one. Raises TransferFailed.
    """
    device, format = tiers.open.device, tiers.format
    rows, groups = rows.cpu().unsqueeze(1).expand_as(groups), groups.cpu()
    heads, each = format.grains(tiers.open).shape[2:4]
    layer, head, page, group = rows // heads, rows % heads, groups * GROUP // format.tokens, groups % each
    found = torch.empty((*groups.shape, format.group_bytes), dtype=torch.uint8, device=device)
    is_open = open_pages.contains(page)
    at = is_open.nonzero(as_tuple=True)
    if len(at[0]):
        places = layer[at], page[at] % open_pages.slots, head[at], group[at]
        picked = format.grains(tiers.open)[tuple(x.to(device) for x in places)]
        found[tuple(x.to(device) for x in at)] = picked
    away = (~is_open).nonzero(as_tuple=True)
    if len(away[0]):
        picked = _far(tiers, *(x[away] for x in (layer, page, head, group)))
        found[tuple(x.to(device) for x in away)] = picked
    return found


def _far(tiers: QuantizedTiers, layer: Tensor, page: Tensor, head: Tensor, group: Tensor) -> Tensor:
    """Return groups `[n, bytes]` on the device of closed pages; all indices are `[n]`."""
    format = tiers.format
    if isinstance(tiers.pages, DiskPages):
        staged = read_grains(tiers, *(x.unsqueeze(1) for x in (layer, page, head, group))).squeeze(1)
    else:
        grains = format.grains(tiers.pages)  # [layers, pages, kv_heads, groups, bytes]
        _, pages, heads, each = grains.shape[:4]
        at = ((layer * pages + page) * heads + head) * each + group
        staged = _staging(tiers, len(at))
        torch.index_select(grains.flatten(0, 3), 0, at, out=staged)
    target = tiers.new_memory(tuple(staged.shape))
    tiers.link.wait(ticket := tiers.link.copy([(target, staged)], tiers.link.mark()))
    tiers.link.finish(ticket)
    return target


def _staging(tiers: QuantizedTiers, count: int) -> Tensor:
    """Return pinned memory for so many groups, valid until the next call."""
    if tiers.staging is None or len(tiers.staging) < count:
        tiers.staging = None  # free it first
        tiers.staging = allocator(tiers.open.device)((count, tiers.format.group_bytes), torch.uint8)
    return tiers.staging[:count]
