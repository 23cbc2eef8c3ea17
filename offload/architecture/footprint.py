"""The parts that a run keeps in memory beside weights and KV cache, in bytes. Imports nothing heavy."""

from __future__ import annotations

from ..config import Speculation
from ..levels import TAIL
from .dims import Dimensions


def activation_bytes(shape: Dimensions, tokens: int, chunk: int, itemsize: int, copies: bool = True) -> int:
    """What computing on chunks of a sequence of `tokens` takes. `copies` are those in fp32 that old CPUs make."""
    rows = min(chunk, tokens)
    rope = 2 * tokens * shape.head_dim * itemsize
    # The widest moment is the MLP: gate, up, their product and the residual; norms are made in fp32.
    row = (3 * shape.intermediate + 2 * shape.hidden + 3 * shape.heads * shape.head_dim) * max(itemsize, 4 * copies)
    if copies:
        widest = 2 * shape.intermediate * shape.hidden * 4
        return rows * 2 * row + widest + rope + 4 * 4 * shape.vocab
    logits = 4 * 4 * shape.vocab * TAIL // 4  # of the longest draft, sorted and made into distributions
    return rows * (row + 2 * 4 * shape.hidden) + rope + logits


def retrieval_bytes(shape: Dimensions, settings: Speculation, tokens: int, itemsize: int, copies: bool = True) -> int:
    """The retrieval cache: mean keys of all chunks, and where chunks are copied, those that are selected."""
    means = shape.kv_bytes(tokens // settings.chunk, itemsize) // 2  # at most
    selected = shape.kv_bytes(min(settings.budget, tokens) + TAIL + settings.chunk, itemsize)
    return means + (selected if copies else 0)


PAGE_BYTES = 8 * 2**20  # of a layer: enough for a link to reach its rate, little enough for two to cost nothing
_LEAST, _MOST = 512, 1024  # tokens


def page_tokens(shape: Dimensions, itemsize: int) -> int:
    """Tokens whose KV, of one layer, travels over the link in one copy."""
    each = shape.layer_kv_bytes(1, itemsize)
    return min(max(PAGE_BYTES // each // _LEAST * _LEAST, _LEAST), _MOST)
