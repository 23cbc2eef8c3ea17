"""Quantised GGUF tensors, split into codes and scales, against the gguf package's own dequantisation."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from offload.loading.formats.gguf_blocks import FORMATS, stored_matrix
from tests.support.quantized import random_blocks


@pytest.mark.parametrize("name", FORMATS)
def test_no_value_changes(name):
    data, expected = random_blocks(name, 7, 768)
    weight = stored_matrix(name, torch.from_numpy(data))
    assert weight.shape == (7, 768)
    assert torch.equal(weight.split().dequantized(), torch.from_numpy(expected))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_whole_blocks_of_columns_can_be_taken(name):
    data, expected = random_blocks(name, 9, 1024)
    weight, expected = stored_matrix(name, torch.from_numpy(data)), torch.from_numpy(expected)
    order = torch.tensor([8, 0, 3])
    assert torch.equal(weight.rows(order).split().dequantized(), expected[order])
    assert torch.equal(weight.columns(slice(256, 768)).dequantized(), expected[:, 256:768])
    assert weight.columns(slice(16, 272)) is None
    assert (weight.columns(slice(32, 96)) is None) == weight.format.nested


@pytest.mark.parametrize("name", FORMATS)
def test_bits_per_weight_are_those_of_the_file_but_for_the_rounding_of_nested_scales(name):
    data, _ = random_blocks(name, 2, 256)
    stored = 8 * data.nbytes / 512
    extra = {"Q4_K": 0.125, "Q5_K": 0.125, "IQ4_XS": 0.0625, "MXFP4": 0.25}.get(
        name, 0.0
    )  # numbers of 6 bits take 8, those of 8 take 16
    assert FORMATS[name].bits_per_weight == stored + extra


def test_scales_beyond_fp16_are_wide_and_groups_of_zeros_have_any():
    data = np.full((3, 2, 17), 0x21, dtype=np.uint8)
    data[:, :, 0] = [[127, 104], [1, 254], [0, 120]]
    data[2, 0, 1:] = 0x80  # -0 and 0
    values = torch.from_numpy(quants.dequantize(data.reshape(3, 34), GGMLQuantizationType.MXFP4))
    for rows, is_wide in ((slice(0, 3), True), (slice(0, 1), False), (slice(2, 3), False)):
        weight = stored_matrix("MXFP4", torch.from_numpy(data.reshape(3, 34))[rows])
        assert weight.format.wide is is_wide
        assert torch.equal(weight.dequantized(), values[rows])
