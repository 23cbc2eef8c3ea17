"""Bytes of quantised keys and values: groups of 32 tokens, and a ring of blocks as they are. Imports nothing heavy."""

from ..settings.kv_formats import KV_FORMATS, PACKED_KV, PLAIN_KV
from .dims import Dimensions

GROUP = 32  # tokens of keys and values that share their scales
BLOCK = 16  # tokens of a block of those that are not quantised
WINDOW = 128  # tokens that are quantised together, as soon as they are complete (KIVI's residual length)


def stored_bytes(shape: Dimensions, kind: str, tokens: int, itemsize: int) -> float:
    """Return the bytes of keys and values of all layers for `tokens` tokens in a format, without a ring."""
    format, exact = KV_FORMATS[kind], shape.full_attention.kv_bytes(tokens, itemsize)
    if format is PLAIN_KV:
        return shape.kv_bytes(tokens, itemsize)
    return shape.window_bytes(tokens, itemsize) + exact * format.number_bits(shape.head_dim) / (8 * itemsize)


def ring_blocks(tokens: int) -> int:
    """Return the blocks of a ring for passes of so many tokens, which leaves room for rollbacks of two windows."""
    return (-(-tokens // WINDOW) + 2) * WINDOW // BLOCK


def quantized_layer_bytes(shape: Dimensions, kind: str, tokens: int, chunk: int, itemsize: int) -> int:
    """Return the bytes of one layer's keys and values of `tokens` tokens that are prefilled in chunks."""
    groups = format_bytes(shape, kind, -(-tokens // WINDOW) * WINDOW, itemsize)
    if (format := KV_FORMATS[kind]) is PACKED_KV:  # the runs under way, of a chunk and before it
        runs = max(-(-min(tokens, chunk) // format.run) + 1, 2)
        return groups + shape.layer_kv_bytes(runs * format.run, itemsize)
    return groups + bf16_layer_bytes(shape, tokens, chunk, itemsize)


def format_bytes(shape: Dimensions, kind: str, tokens: int, itemsize: int) -> int:
    """Return the bytes of one layer's keys and values in a format; of whole runs unless it is plain."""
    format = KV_FORMATS[kind]
    if format is PLAIN_KV:
        return shape.layer_kv_bytes(tokens, itemsize)
    return shape.kv_heads * tokens // format.run * format.run_bytes(shape.head_dim)


def packed_page_bytes(shape: Dimensions, tokens: int) -> int:
    """Return the bytes of a page of packed runs, whole pages of the system's memory."""
    return -(-format_bytes(shape, PACKED_KV.name, tokens, 2) // 4096) * 4096


def bf16_layer_bytes(shape: Dimensions, tokens: int, chunk: int, itemsize: int) -> int:
    """Return the bytes of one layer's tokens that are not quantised, in a sequence prefilled in chunks.

    They are the windows of a chunk, and those before it.
    """
    blocks = ring_blocks(min(tokens, chunk) + WINDOW - 1)
    return shape.kv_heads * blocks * 2 * BLOCK * shape.head_dim * itemsize
