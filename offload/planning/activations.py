"""The bytes of a pass's activations, at the worst moment of a run. Imports no torch."""

from ..architecture.dims import Dimensions
from ..settings.method_sizes import KEPT_QUERIES, TAIL


def activation_bytes(
    shape: Dimensions, tokens: int, chunk: int, itemsize: int, copies: bool = True, prefill: int = 0, decode: int = 0
) -> int:
    """Return the bytes of activations for chunks of a sequence of `tokens`, at the worst moment.

    `copies` says whether weights and activations are copied to fp32, as on CPUs without bf16 arithmetic. `prefill` and
    `decode` are bytes of buffers that exist only while a prompt is read, and only afterwards.
    """
    rows, wide = min(chunk, tokens), max(itemsize, 4 * copies)
    rope = rope_bytes(shape, tokens, itemsize)
    # The peak is in the MLP: gate, up, their product and the residual; norms are computed in fp32.
    width = max(shape.mlp_widths)
    row = (3 * width + 2 * shape.hidden + 3 * shape.heads * shape.head_dim) * wide
    if shape.linear:  # q, k, v and gates as they come and convolved, those of a key head for each of its value heads
        row += 4 * (3 * shape.linear.width + 6 * shape.linear.values)
    if shape.experts:
        row += expert_row_bytes(shape, wide)
    if copies:
        # Beside a widest weight and what is sampled from, the logits of the longest recorded pass, which stay.
        widest = 2 * width * shape.hidden * 4 + (4 + KEPT_QUERIES) * 4 * shape.vocab
        return rope + widest + max(rows * 2 * row + prefill, decode)
    logits = 4 * 4 * shape.vocab * TAIL // 4  # of the longest draft: logits, sorted, and distributions
    return rope + max(rows * (row + 2 * 4 * shape.hidden) + prefill, logits + decode)


def expert_row_bytes(shape: Dimensions, itemsize: int) -> int:
    """Return the bytes of a token's activations in its experts: inputs, gate, up, their product, outputs in fp32."""
    assert shape.experts is not None, "only layers with experts have such rows"
    row = (shape.hidden + 3 * shape.experts.width) * itemsize + shape.hidden * 4
    return shape.experts.per_token * row + 2 * shape.hidden * 4


def rope_bytes(shape: Dimensions, tokens: int, itemsize: int) -> int:
    """Return the bytes of the RoPE tables of a sequence."""
    return 2 * tokens * shape.head_dim * itemsize


def accumulator_bytes(shape: Dimensions, rows: int) -> int:
    """Return the device bytes of attention's states over quantised keys and values, for a pass of `rows`.

    Each row has two; of 64 rows or less, as many as keys are split into at most, and one. See GroupAccumulator.
    """
    return max(2 * rows, 65 * 64) * shape.heads * (2 + shape.head_dim) * 4
