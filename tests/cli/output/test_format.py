"""Numbers as people read them."""

import pytest

from triforce_cli.output.format import about, duration, time_left


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1204, "120 ms"), (3.44, "3.4 s"), (999.9, "999.9 s"), (3067.7, "51 min"), (7199, "120 min"), (19807, "5.5 h")],
)
def test_a_duration_is_in_the_unit_that_reads_best(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "predicted", "left"),
    [
        (5.2, "about 6 s", "0:06 left"),
        (61, "about 2 min", "1:01 left"),
        (7199, "about 120 min", "119:59 left"),
        (11160, "about 3.1 h", "3.1 h left"),
    ],
)
def test_predicted_times(seconds, predicted, left):
    assert (about(seconds), time_left(seconds)) == (predicted, left)
