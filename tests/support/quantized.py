"""Random quantised weights in the blocks of GGUF files."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

_FACTORS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}  # where a block has fp16 numbers


def random_blocks(name, rows, inputs, seed=0):
    """Return the bytes `[rows, n]` of a matrix in a GGUF type, and its weights in fp32 as gguf computes them."""
    kind, generator = GGMLQuantizationType[name], np.random.default_rng(seed)
    if name not in _FACTORS:
        data = quants.quantize(generator.standard_normal((rows, inputs), dtype=np.float32), kind)
    else:  # gguf cannot quantise to these: any bytes are codes and scales
        size, width = gguf.GGML_QUANT_SIZES[kind]
        data = generator.integers(0, 256, (rows, inputs // size, width), dtype=np.uint8)
        for at in _FACTORS[name]:
            factors = generator.choice(np.array([0.01, -0.02, 0.003], dtype=np.float16), data.shape[:2])
            data[..., at : at + 2] = factors[..., None].view(np.uint8)
        data = data.reshape(rows, -1)
    return data, quants.dequantize(data, kind)
