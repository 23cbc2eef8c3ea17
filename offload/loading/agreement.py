"""How often a quantised model and its original choose the same next token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..decoder import Model
from ..kernels.ops import Operations
from ..parallel import Share
from .quantized_checkpoint import QuantizedCheckpoint
from .weights import streamed_model

TOKENS = 256  # at the end of a prompt, that are compared


def agreement(
    model: Model, checkpoint: QuantizedCheckpoint, ids: Sequence[int], operations: Operations, share: Share | None
) -> float:
    """Return the share of the last `TOKENS` positions of `ids` after which both choose the same token.

    They are run as a sequence of their own, by the loaded model and by its original, whose layers are read one at a
    time: it is never in memory as a whole.
    """
    last = torch.tensor(ids[-TOKENS:], device=model.device)
    expected = model.dtype, model.device, operations, model.group, share
    with streamed_model(checkpoint.original, *expected) as original:
        return (_choices(model, last) == _choices(original, last)).float().mean().item()


def _choices(model: Model, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model.forward(ids, model.new_cache(len(ids)))).argmax(-1)
