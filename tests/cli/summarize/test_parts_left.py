"""The time that is left for all parts and requests, by a clock that is set."""

import io

from offload.metrics import Meter
from triforce_cli.output import batch_display
from triforce_cli.output.batch_display import BatchDisplay
from triforce_cli.output.progress import RunFacts
from triforce_cli.output.terminal import Terminal
from triforce_cli.output.turns import Part
from triforce_cli.summarize.passages import PartsLeft


def terminal() -> Terminal:
    return Terminal(io.StringIO(), io.StringIO(), io.StringIO(), {"COLUMNS": "120"})


def test_the_label_of_a_part_has_the_time_of_all_that_are_left():
    now = [0.0]
    left = PartsLeft(10, lambda: now[0])
    parts = [Part(number, 8, 1, "book.txt") for number in range(1, 9)]
    assert left.label(parts[0]) == "book.txt, part 1 of 8"
    for part in parts[:2]:
        with left.reading(part):
            now[0] += 45
    assert left.label(parts[2]) == "book.txt, part 3 of 8, 6:00 left"  # with two parts of another document
    later = Part(1, 2, 2, "book.txt")
    with left.reading(later):
        now[0] += 1000
    assert left.label(later) == "book.txt, part 1 of 2 of round 2"
    assert left.label(parts[2]).endswith("6:00 left")


def test_sequences_together_show_the_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(batch_display.time, "monotonic", lambda: now[0])
    display = BatchDisplay(terminal())
    display.expect(5)
    display.skip()
    meters = [Meter(4), Meter(4)]
    for meter in meters:
        display.start(RunFacts("tiny", "ar", 64, meter))
    assert "left" not in display._line().plain
    now[0] += 20
    display.end(meters[0])
    assert "2 of 5 done · 1:00 left" in display._line().plain


def test_sequences_with_errors_are_done_and_have_no_result():
    display = BatchDisplay(terminal())
    display.expect(3)
    meter = Meter(4)
    display.start(RunFacts("tiny", "ar", 64, meter))
    display.fail(has_run=False)
    display.end(meter)
    display.fail(has_run=True)
    assert "2 of 3 done · 2 failed" in display._line().plain
    assert display.results == 0 and display.statistics("alone").startswith("0 requests done, 2 failed · 0 tokens read")
