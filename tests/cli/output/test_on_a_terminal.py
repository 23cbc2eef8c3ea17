"""`triforce generate` on a terminal: the bar, the status line, colours, and what is left on the screen."""

import os
import re
from itertools import count

import pytest
from rich.text import Text

from offload.events import Prefilled, Restored
from offload.metrics import Meter
from tests.support.command import (
    STATISTICS,
    STORY,
    uncolored,
)
from tests.support.terminal import Pty
from triforce_cli.output.progress import DownloadBar, PrefillLine, ProgressDisplay, RunFacts
from triforce_cli.output.tables import Segment, fitted
from triforce_cli.output.terminal import Terminal

DECODING = " of at most 80 tokens · "


def test_the_tokens_that_a_draft_model_reads_are_shown(on_a_terminal_here, tiny_model_dir):
    _, output = on_a_terminal_here(*STORY, "--draft", tiny_model_dir, "--method", "naive")
    assert re.search(r"the draft model reads [\d,]+/[\d,]+ tokens", uncolored(output))


def test_no_color_and_dumb_terminals_are_respected(on_a_terminal_here):
    _, output = on_a_terminal_here(*STORY, env={"NO_COLOR": "1"})
    assert DECODING in uncolored(output)
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", output.replace("\x1b[1m", "").replace("\x1b[2m", ""))
    _, output = on_a_terminal_here(*STORY, env={"TERM": "dumb"})
    assert "\x1b" not in output
    assert STATISTICS.search(output)


def test_no_status_line_under_text_that_comes_back_through_a_pipe(on_a_terminal_here):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe, os.fdopen(reading, "rb"):
        _, output = on_a_terminal_here(*STORY, stdout=pipe)
    assert DECODING not in output
    assert STATISTICS.search(output)


@pytest.mark.parametrize("columns", [20, 45, 80, 120])
def test_the_prefill_line_moves_within_a_chunk_and_names_restored_tokens(columns):
    seconds, meter, passed = count(1000, 0.1), Meter(2000), [0.0]
    facts = RunFacts(meter, pass_tokens=lambda: passed[0])
    line = PrefillLine(facts, lambda: columns, lambda: next(seconds))

    def after(event=None, tokens=0.0):
        if event is not None:
            meter.observe(event)
            line.event = event
        passed[0] = tokens
        return line().plain

    after(Prefilled(0, 2000))
    reading = after(Prefilled(1000, 2000, True))
    meter.observe(Restored(1000, 10**6, 0.0))
    computed = after(Prefilled(1500, 2000))
    later, *last = [after(tokens=tokens) for tokens in (250.0, 400.0, 0.0)]
    assert "1,000/2,000 tokens" in reading and "1,500/2,000 tokens" in computed and "1,750/2,000" in later
    assert all("1,900/2,000" in shown for shown in last)  # it does not go back before the next event
    if columns >= 45:
        assert max(map(len, (reading, computed, later, *last))) <= columns
        assert last[0].count("━") >= later.count("━") >= computed.count("━") > 0
    if columns >= 80:
        assert "reading the cache" in reading and "1,000 from the cache" in computed
        assert "1,667/s · 0:01 left" in computed  # 500 tokens in .3 s


HOSTILE = "a\x1b]52;c;aGk=\x07\x9b2J\u202e[b]"


def test_nothing_that_names_something_controls_the_terminal():
    """Names of models and of files, and errors, come from others."""
    pty = Pty(columns=80, rows=24)
    terminal = Terminal(
        stdout=pty.stream(),
        stderr=pty.stream(),
        environ={"TERM": "xterm-256color", "TRIFORCE_DEBUG": "1"},
        color="always",
    )
    display = ProgressDisplay(terminal)
    display.loading(f"loading {HOSTILE}")
    display.loading(f"really {HOSTILE}")
    with DownloadBar(terminal) as bar:
        bar(f"downloading {HOSTILE}", 1, 2)
    display.status(lambda: fitted([Segment(HOSTILE)], 79))
    display.start(RunFacts(Meter(2), label=HOSTILE))
    display.event(Prefilled(1, 2))
    display.close()
    terminal.print(Text(f"{HOSTILE}\n", style="bold"))
    terminal.trace(ValueError(HOSTILE))
    output = pty.output()
    assert output.count("␛]52;c;") >= 6
    for raw in ("\x1b]", "\x07", "\x9b", "\u202e"):
        assert raw not in output
