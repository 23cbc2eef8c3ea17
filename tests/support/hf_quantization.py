"""Writes checkpoints as other libraries quantise them, and their dequantised twins, from the formats' descriptions."""

import json

import torch
from safetensors.torch import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def integers(weight, bits, group, symmetric, dtype=torch.float16):
    """Round a matrix to codes `[rows, inputs]`, scales and zero points `[rows, groups]`, and return its values too."""
    x = weight.float().unflatten(1, (-1, group))
    low, high, most = x.amin(2), x.amax(2), 2**bits - 1
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).to(dtype)
    zeros = torch.full(scales.shape, 2 ** (bits - 1)) if symmetric else (-low / scales.float()).round().clamp(0, most)
    zeros, wide = zeros.long(), scales.float().unsqueeze(2)
    codes = (x / wide + zeros.unsqueeze(2)).round().clamp(0, most).long()
    values = (codes - zeros.unsqueeze(2)) * wide
    return codes.flatten(1), scales, zeros, values.flatten(1)


def packed(codes, bits, order=range(8)):
    """Put codes along the last axis into int32: place i of each has the one numbered `order[i]`."""
    each = codes.unflatten(-1, (-1, 32 // bits))
    total = sum(each[..., number] << bits * place for place, number in zip(range(32 // bits), order, strict=False))
    return torch.where(total >= 2**31, total - 2**32, total).int()


def gptq(weight, bits=4, group=32, symmetric=True, version=1):
    codes, scales, zeros, values = integers(weight, bits, group, symmetric)
    stored = zeros - 1 if version == 1 else zeros
    return {
        "qweight": packed(codes, bits).T.contiguous(),
        "qzeros": packed(stored.T.contiguous(), bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }, values


def awq(weight, group=32):
    codes, scales, zeros, values = integers(weight, 4, group, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(codes.T.contiguous(), 4, order),
        "qzeros": packed(zeros.T.contiguous(), 4, order),
        "scales": scales.T.contiguous(),
    }, values


def pack_quantized(weight, bits=4, group=32, symmetric=True):
    codes, scales, zeros, values = integers(weight, bits, group, symmetric, torch.bfloat16)
    tensors = {
        "weight_packed": packed(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros.T.contiguous(), bits).T.contiguous()
    return tensors, values


def int_quantized(weight, symmetric=True):
    codes, scales, zeros, values = integers(weight, 8, weight.shape[1], symmetric, torch.float32)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return tensors, values


def float8(weight, block=(128, 128), name="weight_scale_inv", dtype=torch.float32):
    """Scale blocks of rows and inputs so that the largest weight of each is 448, e4m3's largest number."""
    rows, inputs = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-inputs // block[1]))
    codes, values = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn), torch.empty(rows, inputs)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = scales[i, j] = (weight[at].abs().max() / 448).to(dtype).float()
            codes[at] = (weight[at].float() / scale).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scale
    return {"weight": codes, name: scales.to(dtype)}, values


def write_quantized(folder, model, quantise, config, skip=(), head=False):
    """Save a model whose linears are quantised in `folder`, and the same weights in floating point beside it.

    `quantise` returns the tensors of a linear and its values; linears whose name has one of `skip` in it stay plain.
    """
    plain = folder.with_name(f"{folder.name}-plain")
    for path in (folder, plain):
        model.save_pretrained(path)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(".weight")]:
        stem = name.removesuffix(".weight")
        is_linear = stem.endswith(LINEARS) or (head and stem == "lm_head")
        if is_linear and not any(part in stem for part in skip):
            parts, values[name] = quantise(tensors.pop(name))
            tensors |= {f"{stem}.{part}": x for part, x in parts.items()}
    save_file(load_file(plain / "model.safetensors") | values, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(settings))
    return plain, values
