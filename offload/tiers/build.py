"""From a placement to a tiered store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..native import Kernel
from ..native.blocks import host_memory
from ..operations import Operations
from ..shape import ModelShape
from .balance import Balance
from .forms import BlockForm, Form, PlainForm
from .host import HostAttention
from .link import Link
from .staging import Ring
from .store import TieredStore, Tiers

_PIECE_BYTES = 8 * 2**20  # of a layer: enough for a link to reach its rate, little enough for two to cost nothing
_LEAST, _MOST = 512, 1024  # tokens
_SHARES = {"stream": 0.0, "host": 1.0, "hybrid": None}

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class TierSettings:
    """How the KV cache is spread.

    `mode` is stream, host or hybrid; `share` the host's part, None for what makes both end together; `piece` in tokens,
    None for what suits the model; `host_bandwidth`, in bytes a second, slows the host down, for experiments.
    """

    mode: str = "stream"
    resident_layers: int = 0
    share: float | None = None
    piece: int | None = None
    buffers: int = 2
    overlap: bool = True
    host_bandwidth: float | None = None


def piece_tokens(shape: ModelShape, itemsize: int) -> int:
    """Tokens of a piece."""
    each = shape.kv_bytes(1, itemsize) // shape.layers
    return min(max(_PIECE_BYTES // each // _LEAST * _LEAST, _LEAST), _MOST)


def build_store(
    shape: ModelShape,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations,
    link: Link,
    settings: TierSettings,
    kernel: Kernel | None = None,
    allocate: Allocate = host_memory,
) -> TieredStore:
    """An empty store.

    Args:
        operations: the model's, for the resident layers.
        kernel: the native kernel, if it can attend on this machine's CPU.
        allocate: gives memory on the host.
    """
    piece = settings.piece or piece_tokens(shape, dtype.itemsize)
    form: Form = PlainForm(shape, piece) if kernel is None else BlockForm(shape, piece, kernel)
    resident_layers = min(settings.resident_layers, shape.layers)
    away, pieces = shape.layers - resident_layers, -(-capacity // piece)
    resident = None
    if resident_layers:
        resident = operations.new_store(replace(shape, layers=resident_layers), capacity, dtype, device)
    with torch.inference_mode(False):
        buffers = torch.empty((settings.buffers, form.numbers), dtype=dtype, device=device).unbind()
        tiers = Tiers(
            form=form,
            link=link,
            ring=Ring(link, buffers, settings.overlap),
            balance=Balance(settings.share if settings.share is not None else _SHARES[settings.mode]),
            host=None if settings.mode == "stream" else HostAttention(form, settings.host_bandwidth),
            resident=resident,
            resident_layers=resident_layers,
            pieces=allocate((away, pieces, form.numbers), dtype),
            open=torch.empty((away, 2, form.numbers), dtype=dtype, device=device),
        )
    return TieredStore(shape, tiers)
