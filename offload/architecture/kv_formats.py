"""Bytes of keys and values in fewer bits: groups of 32 tokens, runs of 128, and a ring of blocks as they are.

Imports nothing heavy.
"""

from __future__ import annotations

from ..settings.config import EXACT
from .dims import Dimensions

GROUP = 32  # tokens of keys and values that share their scales
BLOCK = 16  # tokens of a block of those that are not quantised
WINDOW = 128  # tokens that are quantised together, as soon as they are complete (KIVI's residual length)
SINK = GROUP  # first tokens, which are never quantised
RUN = 128  # tokens of a KV head whose keys and values are packed together, without loss
PATCHES = 30  # most values of a run that are stored apart, with 2 bytes for each one's place


def group_bytes(kind: str, head_dim: int) -> int:
    """Return the bytes of a group's keys and values of one head: bf16 scales and middles, and codes of 4 or 8 bits."""
    return 4 * head_dim + 4 * GROUP + GROUP * head_dim * (1 if kind == "q4" else 2)


def run_header_bytes(head_dim: int) -> int:
    """Return the bytes of a packed run before its planes: the channels' exponents, and the values stored apart."""
    return -(-(3 * head_dim + 2 * RUN // GROUP + 4 * PATCHES) // 64) * 64


def run_bytes(head_dim: int) -> int:
    """Return the bytes of a packed run, the keys and values of 128 tokens of one head, in 12 bits each."""
    return run_header_bytes(head_dim) + 2 * RUN * head_dim * 3 // 2


def stored_bytes(shape: Dimensions, kind: str, tokens: int, itemsize: int) -> float:
    """Return the bytes of keys and values of all layers for `tokens` tokens in a format, without a ring."""
    if kind == EXACT:
        return shape.kv_bytes(tokens, itemsize)
    exact = shape.growing.kv_bytes(tokens, itemsize)
    return shape.window_bytes(tokens, itemsize) + exact * group_bytes(kind, shape.head_dim) / (
        2 * GROUP * shape.head_dim * itemsize
    )


def ring_blocks(tokens: int) -> int:
    """Return the blocks of a ring for passes of so many tokens, which leaves room for rollbacks of two windows."""
    return (-(-tokens // WINDOW) + 2) * WINDOW // BLOCK


def quantized_layer_bytes(shape: Dimensions, kind: str, tokens: int, chunk: int, itemsize: int) -> int:
    """Return the bytes of one layer's keys and values of `tokens` tokens that are prefilled in chunks."""
    groups = format_bytes(shape, kind, -(-tokens // WINDOW) * WINDOW, itemsize)
    return groups + bf16_layer_bytes(shape, tokens, chunk, itemsize)


def format_bytes(shape: Dimensions, kind: str, tokens: int, itemsize: int) -> int:
    """Return the bytes of one layer's keys and values in a format; of a multiple of GROUP tokens if quantised."""
    if kind == EXACT:
        return shape.layer_kv_bytes(tokens, itemsize)
    return shape.kv_heads * tokens // GROUP * group_bytes(kind, shape.head_dim)


def bf16_layer_bytes(shape: Dimensions, tokens: int, chunk: int, itemsize: int) -> int:
    """Return the bytes of one layer's tokens that are not quantised, in a sequence prefilled in chunks.

    They are the window before a chunk, the sink, and room for a path across the end of a window.
    """
    blocks = ring_blocks(min(tokens, chunk) + WINDOW - 1) + (SINK + 2 * WINDOW) // BLOCK
    return shape.kv_heads * blocks * 2 * BLOCK * shape.head_dim * itemsize
