"""Estimates the memory of a run in bytes, apart from weights and the full KV cache. Imports nothing heavy."""

from __future__ import annotations

from ..config import Speculation
from ..levels import PADDING, TAIL, selected_chunk
from .dims import Dimensions


def activation_bytes(shape: Dimensions, tokens: int, chunk: int, itemsize: int, copies: bool = True) -> int:
    """Return the bytes of activations for chunks of a sequence of `tokens`.

    `copies` says whether weights and activations are copied to fp32, as on CPUs without bf16 arithmetic.
    """
    rows = min(chunk, tokens)
    rope = 2 * tokens * shape.head_dim * itemsize
    # The peak is in the MLP: gate, up, their product and the residual; norms are computed in fp32.
    row = (3 * shape.intermediate + 2 * shape.hidden + 3 * shape.heads * shape.head_dim) * max(itemsize, 4 * copies)
    if copies:
        widest = 2 * shape.intermediate * shape.hidden * 4
        return rows * 2 * row + widest + rope + 4 * 4 * shape.vocab
    logits = 4 * 4 * shape.vocab * TAIL // 4  # of the longest draft: logits, sorted, and distributions
    return rows * (row + 2 * 4 * shape.hidden) + rope + logits


def retrieval_bytes(
    shape: Dimensions, settings: Speculation, tokens: int, itemsize: int, copies: bool = True, grain: int = 1
) -> int:
    """Return the bytes of the retrieval cache: mean keys of all chunks, and with `copies` the selected chunks.

    `grain`: tokens that the full cache's store can only select together.
    """
    chunk = selected_chunk(settings, grain)
    means = shape.kv_bytes(tokens // chunk, itemsize) // 2  # at most
    selected = shape.kv_bytes(min(settings.budget, tokens) + TAIL + PADDING + chunk, itemsize)
    return means + (selected if copies else 0)


PAGE_GRAIN = 16  # tokens of a block of the native kernel, in which pages lie so that the host can attend to them
PAGE_BYTES = 8 * 2**20  # of one layer: large enough for the link's full rate, small enough for two staging buffers
_LEAST, _MOST = 512, 1024  # tokens


def page_tokens(shape: Dimensions, itemsize: int) -> int:
    """Return the tokens of a page: their KV, of one layer, is copied over the link at once."""
    each = shape.layer_kv_bytes(1, itemsize)
    return min(max(PAGE_BYTES // each // _LEAST * _LEAST, _LEAST), _MOST)
