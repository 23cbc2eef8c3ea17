"""Numbers as people read them."""

import pytest

from triforce_cli.output.format import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1204, "120 ms"), (3.44, "3.4 s"), (999.9, "999.9 s"), (3067.7, "51 min"), (7199, "120 min"), (19807, "5.5 h")],
)
def test_a_duration_is_in_the_unit_that_reads_best(seconds, text):
    assert duration(seconds) == text
