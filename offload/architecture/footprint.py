"""Estimates the memory of a run in bytes, apart from weights and the full KV cache. Imports nothing heavy."""

from typing import NamedTuple

from ..settings.config import Speculation
from ..settings.kv_formats import BF16, KV_FORMATS
from ..settings.method_sizes import (
    KEPT_QUERIES,
    PADDING,
    TAIL,
    middle_tokens,
    selected_chunk,
    tail_tokens,
)
from .dims import Dimensions
from .tier_footprint import GATHERED_BYTES


def activation_bytes(
    shape: Dimensions, tokens: int, chunk: int, itemsize: int, copies: bool = True, prefill: int = 0, decode: int = 0
) -> int:
    """Return the bytes of activations for chunks of a sequence of `tokens`, at the worst moment.

    `copies` says whether weights and activations are copied to fp32, as on CPUs without bf16 arithmetic. `prefill` and
    `decode` are bytes of buffers that exist only while a prompt is read, and only afterwards.
    """
    rows = min(chunk, tokens)
    rope = rope_bytes(shape, tokens, itemsize)
    # The peak is in the MLP: gate, up, their product and the residual; norms are computed in fp32.
    width = max(shape.mlp_widths)
    row = (3 * width + 2 * shape.hidden + 3 * shape.heads * shape.head_dim) * max(itemsize, 4 * copies)
    if shape.linear:  # q, k, v and gates as they come and convolved, those of a key head for each of its value heads
        row += 4 * (3 * shape.linear.width + 6 * shape.linear.values)
    if shape.experts:  # a row for each expert of a token: what it takes, gate, up, their product, and outputs in fp32
        row += expert_row_bytes(shape, max(itemsize, 4 * copies))
    if copies:
        # Beside a widest weight and what is sampled from, the logits of the longest recorded pass, which stay.
        widest = 2 * width * shape.hidden * 4 + (4 + KEPT_QUERIES) * 4 * shape.vocab
        return rope + widest + max(rows * 2 * row + prefill, decode)
    logits = 4 * 4 * shape.vocab * TAIL // 4  # of the longest draft: logits, sorted, and distributions
    return rope + max(rows * (row + 2 * 4 * shape.hidden) + prefill, logits + decode)


def expert_row_bytes(shape: Dimensions, itemsize: int) -> int:
    """Return the bytes of a token's activations in its experts."""
    each = (shape.hidden + 3 * shape.experts.width) * itemsize + shape.hidden * 4
    return shape.experts.per_token * each + 2 * shape.hidden * 4


def rope_bytes(shape: Dimensions, tokens: int, itemsize: int) -> int:
    """Return the bytes of the RoPE tables of a sequence."""
    return 2 * tokens * shape.head_dim * itemsize


DEQUANTIZED_BYTES = 64 * 2**20  # of a quantised weight that a GPU dequantises at once, for more rows than a few


def dequantized_bytes(shape: Dimensions) -> int:
    """Return the bytes of the weights that a GPU dequantises at once, in bf16: some outputs of the largest linear."""
    return min(DEQUANTIZED_BYTES, 2 * 2 * max(shape.mlp_widths) * shape.hidden)


SCORED_BYTES = 64 * 2**20  # of mean keys in fp32 that a GPU computes at once


class Where(NamedTuple):
    """Where the full cache's keys and values are, and how they are selected.

    Attributes:
        device: "cpu" or "cuda".
        offloaded: layers whose KV is in host memory.
        in_place: the selected chunks are a list of the full cache's blocks or chunks, not a copy.
        kv: the format of the full cache's keys and values.
    """

    device: str
    offloaded: int = 0
    in_place: bool = False
    kv: str = BF16


def retrieval_bytes(shape: Dimensions, settings: Speculation, tokens: int, itemsize: int, where: Where) -> int:
    """Return the bytes of the selected cache, with the mean keys and queries that are kept for selections."""
    chunk = chunk_of(settings, tokens, where)
    chunks, slots = tokens // chunk, middle_tokens(settings, tokens) // chunk
    table = shape.layers * shape.kv_heads * slots * 4
    copied = shape.kv_bytes(tail_tokens(settings) + chunk + PADDING, itemsize)
    copied += shape.kv_bytes(slots * chunk, itemsize)
    selected = table if where.in_place else copied
    queries = shape.layers * KEPT_QUERIES * shape.heads * shape.head_dim * itemsize
    return selected + queries + kept_mean_key_bytes(shape, chunks, itemsize, where)


def chunk_of(settings: Speculation, tokens: int, where: Where, in_blocks: bool = True) -> int:
    """Return how many tokens are selected together: whole blocks of the native kernel, where it attends or could.

    Of quantised keys and values they are groups. No chunk
    crosses the end of a page. `in_blocks`: pages lie in the kernel's blocks.
    """
    device, offloaded, in_place, kv = where
    grain = PAGE_GRAIN if (offloaded and in_blocks) or (in_place and device == "cpu") else 1
    # A page has one of the two sizes, and no chunk crosses its end.
    span = 0 if not offloaded else _MOST if settings.chunk > LEAST_PAGE else LEAST_PAGE
    grain = max(grain, KV_FORMATS[kv].grain)
    return selected_chunk(settings, grain, span, tokens)


def kept_mean_key_bytes(shape: Dimensions, chunks: int, itemsize: int, where: Where) -> int:
    """Return the bytes of the mean keys that a selector keeps; see caches/chunk_scores.py."""
    if where.device == "cpu":
        return shape.kv_bytes(chunks, itemsize) // 2
    return where.offloaded * shape.kv_heads * chunks * (shape.head_dim + 4)  # 8 bits, and a scale in fp32


def selection_bytes(shape: Dimensions, settings: Speculation, tokens: int, where: Where) -> int:
    """Return the bytes that a selection takes while it runs."""
    chunk = chunk_of(settings, tokens, where)
    chunks, slots = tokens // chunk, middle_tokens(settings, tokens) // chunk
    rows = shape.layers * shape.kv_heads
    if where.device == "cpu":
        return rows * (8 * chunks + 16 * slots)  # scores in two precisions; the indices and scores chosen
    scoring = 3 * SCORED_BYTES + 2 * 4 * shape.kv_heads * chunks
    copies = 3 if where.offloaded else 1  # as they come over the link, in plain order, and all of them together
    replacing = rows * (4 * chunks + 12 * 8 * slots) + copies * GATHERED_BYTES  # booleans by chunk, integers by slot
    return 8 * rows * slots + max(scoring, replacing)


PAGE_GRAIN = 16  # tokens of a block of the native kernel, in which pages lie so that the host can attend to them
PAGE_BYTES = 8 * 2**20  # of one layer: large enough for the link's full rate, small enough for two staging buffers
LEAST_PAGE, _MOST = 512, 1024  # tokens; the native kernel sums over so many in one piece


def page_tokens(shape: Dimensions, itemsize: int) -> int:
    """Return the tokens of a page: their KV, of one layer, is copied over the link at once."""
    each = shape.layer_kv_bytes(1, itemsize)
    return min(max(PAGE_BYTES // each // LEAST_PAGE * LEAST_PAGE, LEAST_PAGE), _MOST)
