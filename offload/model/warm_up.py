"""Warms a model up by dummy passes, so that no product compiles, and no library starts, in mid-run."""

import warnings

import torch

from ..errors import Degraded
from ..kernels.triton import ROWS
from .decoder import Model

_TOKENS = (1, 17, 33, ROWS + 1)  # one pass for each block of rows that a product has, and one that dequantises


def warm_up_model(model: Model) -> None:
    """Run a dummy pass of each kind over throwaway caches, which compiles all products with quantised weights.

    Without effect where weights arrive over a link with every pass. Warns if a pass fails.
    """
    if not model.keeps_weights:
        return
    try:
        with torch.inference_mode():
            for tokens in _TOKENS:
                ids = torch.zeros(tokens, dtype=torch.long, device=model.device)
                model.logits(model.forward(ids, model.new_cache(tokens)))
    except Exception as error:  # of the compiler or the driver
        warnings.warn(f"a pass fails before the first prompt: {error}", Degraded, stacklevel=2)
