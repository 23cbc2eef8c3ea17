"""The status line of several sequences, by a clock that is set."""

import io

from offload.metrics import Meter
from triforce_cli.output import batch_display
from triforce_cli.output.batch_display import BatchDisplay
from triforce_cli.output.progress import RunFacts
from triforce_cli.output.terminal import Terminal


def terminal() -> Terminal:
    return Terminal(io.StringIO(), io.StringIO(), io.StringIO(), {"COLUMNS": "120"})


def test_sequences_together_show_the_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(batch_display.time, "monotonic", lambda: now[0])
    display = BatchDisplay(terminal())
    display.expect(5)
    display.skip()
    meters = [Meter(4), Meter(4)]
    for meter in meters:
        display.start(RunFacts(meter))
    assert "left" not in display.line().plain
    now[0] += 20
    display.end(meters[0])
    assert "2 of 5 done · 1:00 left" in display.line().plain


def test_sequences_with_errors_are_done_and_have_no_result():
    display = BatchDisplay(terminal())
    display.expect(3)
    meter = Meter(4)
    display.start(RunFacts(meter))
    display.fail(has_run=False)
    display.end(meter)
    display.fail(has_run=True)
    assert "2 of 3 done · 2 failed" in display.line().plain
    assert display.results == 0 and display.statistics("alone").startswith("0 requests done, 2 failed · 0 tokens read")
