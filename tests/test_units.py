"""Sizes and counts as the program writes them."""

import pytest

from offload.units import GIB, counted, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (12_600, "12.3 KiB"),
        (2**20, "1.0 MiB"),
        (350 * 2**20, "350.0 MiB"),
        (GIB, "1.00 GiB"),
        (20 * GIB, "20.00 GiB"),
    ],
)
def test_sizes_are_in_a_unit_that_fits(size, text):
    assert size_text(size) == text


def test_one_is_singular():
    assert [counted(count, "token") for count in (0, 1, 2, 1200)] == ["0 tokens", "1 token", "2 tokens", "1,200 tokens"]
