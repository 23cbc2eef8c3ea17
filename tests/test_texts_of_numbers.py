"""Sizes, counts and times as the program writes them."""

import pytest

from offload.units import GIB, counted, size_text
from triforce_cli.output.format import about, duration, time_left


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (12_600, "12.3 KiB"), (2**20, "1.0 MiB"), (GIB, "1.00 GiB")],
)
def test_sizes_are_in_a_unit_that_fits(size, text):
    assert size_text(size) == text


def test_one_is_singular():
    assert [counted(count, "token") for count in (0, 1, 2, 1200)] == ["0 tokens", "1 token", "2 tokens", "1,200 tokens"]


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        (0.1204, ("120 ms", "about 1 s", "0:01 left")),
        (5.2, ("5.2 s", "about 6 s", "0:06 left")),
        (61, ("61.0 s", "about 2 min", "1:01 left")),
        (3067.7, ("51 min", "about 52 min", "51:08 left")),
        (7199, ("120 min", "about 120 min", "119:59 left")),
        (11160, ("3.1 h", "about 3.1 h", "3.1 h left")),
    ],
)
def test_times_are_in_the_unit_that_reads_best(seconds, texts):
    assert (duration(seconds), about(seconds), time_left(seconds)) == texts
