"""Quantised copies of a loaded model, which draft for it: how they are made, and how well they agree with it."""

from collections.abc import Iterator, Sequence
from copy import copy

import torch

from ..kernels.ops import Operations
from ..model.decoder import Layer, Model, QuantizedCopy
from ..parallel import Share
from .formats.quantization import QuantizedCheckpoint
from .formats.safetensors import Checkpoint
from .weights import load_head, load_layers, streamed_model

TOKENS = 256  # at the end of a prompt, that are compared
_ROWS = 32  # whose logits are in memory at once


def agreement(
    model: Model, checkpoint: QuantizedCheckpoint, ids: Sequence[int], operations: Operations, share: Share | None
) -> float:
    """Return the share of the last `TOKENS` positions of `ids` after which both choose the same token.

    They are run as a sequence of their own, by the loaded model and by its original, whose layers are read one at a
    time: it is never in memory as a whole.
    """
    source = copy(checkpoint.original)
    source.shape = checkpoint.shape  # with the same extension of the context
    expected = model.dtype, model.device, operations, model.group, share
    with streamed_model(source, *expected) as original:
        return (choices(model, ids) == choices(original, ids)).float().mean().item()


def choices(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Return the likeliest token after each of the last `TOKENS` of `ids`, which are run as a sequence of their own."""
    last = torch.tensor(ids[-TOKENS:], device=model.device)
    hidden = model.forward(last, model.new_cache(len(last)))
    return torch.cat([model.logits(rows).argmax(-1) for rows in hidden.split(_ROWS)])


_SAMPLE = 4  # layers that are rounded to estimate what rounding all of them would change


class QuantizedCopies:
    """Makes copies of a model with rounded weights, from its checkpoint, and keeps them, one for each level.

    Embedding and final norm are the model's own. Weights are rounded without a fit, in a fraction of the time: the
    model verifies what its copy drafts.
    """

    def __init__(self, model: Model, checkpoint: Checkpoint, share: Share | None = None) -> None:
        """Copy `model`, which was loaded from `checkpoint`, in floating point, or this rank's `share` of that."""
        self._model, self._checkpoint, self._share = model, checkpoint, share
        self._made: dict[str, QuantizedCopy] = {}

    def __getitem__(self, level: str) -> QuantizedCopy:
        """Return the copy of a level that has been made. Raises KeyError."""
        return self._made[level]

    def make(self, level: str, ids: Sequence[int]) -> QuantizedCopy:
        """Return the copy of a level, making it at the first call; its agreement is measured on the end of `ids`.

        The time is that of reading the checkpoint and of rounding, mostly; see docs/cli.md for measurements.
        """
        if level not in self._made:
            rounded = QuantizedCheckpoint(self._checkpoint, level)
            model = self._model
            layers = list(load_layers(rounded, model, self._share))
            copy = model.with_weights(layers, load_head(rounded, model, self._share))
            self._made[level] = QuantizedCopy(copy, level, self._agreement(copy, ids))
        return self._made[level]

    @torch.inference_mode()
    def changed_by_q4(self, ids: Sequence[int]) -> float:
        """Estimate the share of the choices after the last tokens of `ids` that a copy at q4 would change.

        A few layers are rounded. The errors of layers are independent, so that those of all are larger by the square
        root of how many there are; and a small error changes choices in proportion to its size.
        """
        model, count = self._model, self._model.shape.layers
        some = range(count // (2 * _SAMPLE), count, max(count // _SAMPLE, 1))
        rounded = QuantizedCheckpoint(self._checkpoint, "q4")
        sample = dict(zip(some, load_layers(rounded, model, self._share, some), strict=True))
        changed = 1 - self._agreement(model.with_weights(_Replaced(model, sample)), ids)
        return min(changed * (count / len(some)) ** 0.5, 1.0)

    def _agreement(self, copy: Model, ids: Sequence[int]) -> float:
        same = (choices(copy, ids) == choices(self._model, ids)).float().mean().item()
        return float(self._model.group.agree([same])[0])  # decisions follow from it, and processors round differently


class _Replaced:
    """The layers of a model, some of them replaced."""

    def __init__(self, model: Model, replaced: dict[int, Layer]) -> None:
        self._model, self._replaced = model, replaced

    def __iter__(self) -> Iterator[Layer]:
        for index, layer in enumerate(self._model.layers()):
            yield self._replaced.get(index, layer)
