"""Random quantised weights in the blocks of GGUF files."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from offload.architecture.weight_formats import QuantizedFormat
from offload.kernels.quantized import QuantizedTensor
from offload.loading.formats.gguf_blocks import stored_matrix

_FACTORS = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}  # where a block has fp16 numbers


WIDE_FORMATS = {
    "int4 of 128": QuantizedFormat("int4", 4, 128, False, False, tuple(range(-8, 8)), wide=True),
    "int4 with minima": QuantizedFormat("int4", 4, 64, False, True, tuple(range(-8, 8)), wide=True),
    "int8 with minima": QuantizedFormat("int8", 8, 32, False, True, tuple(range(-128, 128)), wide=True),
    "fp8": QuantizedFormat("fp8", 8, 128, False, False, (), wide=True),
}


def random_weight(name, rows, inputs, seed=0):
    """Return a quantised matrix in one of GGUF's formats or of WIDE_FORMATS, and its weights in fp32."""
    if name not in WIDE_FORMATS:
        data, values = random_blocks(name, rows, inputs, seed)
        return stored_matrix(name, torch.from_numpy(data)), torch.from_numpy(values)
    kind, random = WIDE_FORMATS[name], torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**kind.bits, (rows, inputs // 32, 32), dtype=torch.uint8, generator=random)
    if kind.is_float:
        codes = torch.where(codes & 127 == 127, 3, codes).view(torch.float8_e4m3fn)  # no NaN
    elif kind.bits == 8:
        codes = codes.view(torch.int8)
    scales, minima = torch.randn((2, rows, inputs // kind.group), generator=random)
    weight = QuantizedTensor(kind, codes, scales, minima if kind.has_minimum else None)
    return weight, weight.dequantized()


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
