"""How often a model whose weights were rounded chooses the token of the original."""

from collections.abc import Sequence

import torch

from ..kernels.ops import Operations
from ..model.decoder import Model
from ..parallel import Share
from .formats.checkpoint import Checkpoint
from .weights import streamed_model

TOKENS = 256  # at the end of a prompt, that are compared
_ROWS = 32  # whose logits are in memory at once


def agreement(
    model: Model, checkpoint: Checkpoint, ids: Sequence[int], operations: Operations, share: Share | None
) -> float:
    """Return the share of the last `TOKENS` positions of `ids` after which both choose the same token.

    They are run as a sequence of their own, by the loaded model and by its original, whose layers are read one at a
    time: it is never in memory as a whole.
    """
    settings = model.dtype, model.device, operations, model.group, share
    with streamed_model(checkpoint.rounded(None), *settings) as original:
        return (choices(model, ids) == choices(original, ids)).float().mean().item()


def choices(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Return the likeliest token after each of the last `TOKENS` of `ids`, which are run as a sequence of their own."""
    last = torch.tensor(ids[-TOKENS:], device=model.device)
    hidden = model.forward(last, model.new_cache(len(last)))
    return torch.cat([model.logits(rows).argmax(-1) for rows in hidden.split(_ROWS)])
