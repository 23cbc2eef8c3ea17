"""Events in, text or JSON lines out, progress and statistics on stderr."""

import json

import pytest

from offload.errors import TriforceError
from offload.events import Finished, Gain, LevelStatistics, Prefilled, Speculated, Text, Thought, Tokens
from offload.metrics import Meter, Summary
from tests.support.terminal import Pty, Screen, stream, written
from triforce_cli.output import progress
from triforce_cli.output.progress import RunFacts
from triforce_cli.output.renderers import Renderer
from triforce_cli.output.statistics import detail_lines, statistics_line
from triforce_cli.output.stdout_formats import JsonOutput, TextOutput, json_line
from triforce_cli.output.terminal import Terminal
from triforce_cli.run.verify import refuse_loss

EVENTS = [
    Prefilled(0, 1000),
    Prefilled(1000, 1000),
    Tokens((1,)),
    Text("Once"),
    Tokens((2, 3)),
    Text(" upon é"),
    Finished("eos"),
]


def text_renderer(terminal, show_thinking=False, **options) -> Renderer:
    return Renderer(terminal, TextOutput(show_thinking), **options)


def json_renderer(terminal, **options) -> Renderer:
    return Renderer(terminal, JsonOutput(), **options)


def started(renderer, method="plain") -> Meter:
    """The meter of the generation that the renderer has started."""
    meter = Meter(1000)
    renderer.start(RunFacts(meter, 300, method))
    return meter


def feed(renderer, meter, events) -> None:
    for event in meter.watch(events):
        renderer.event(event)


def play(renderer, events=EVENTS, end="finish") -> Summary:
    renderer.loading("loading tiny [bold]")
    meter = started(renderer)
    feed(renderer, meter, events)
    summary = meter.summary("interrupted" if end == "interrupt" else "eos", seed=42, method="plain", model="tiny")
    getattr(renderer, end)(summary)
    renderer.close()
    return summary


def test_piped_text_and_one_line_of_statistics():
    out, err = stream(), stream()
    summary = play(text_renderer(Terminal(out, err, stream(), {})))
    assert written(out) == "Once upon é\n"
    assert written(err) == statistics_line(summary) + "\n"


def test_json_lines():
    out = stream()
    summary = play(json_renderer(Terminal(out, stream(), stream(), {})))
    lines = [json.loads(line) for line in written(out).splitlines()]
    assert lines[:-1] == [
        {"type": "prefill", "done": 0, "total": 1000, "restored": False},
        {"type": "prefill", "done": 1000, "total": 1000, "restored": False},
        {"type": "text", "text": "Once", "tokens": 1},
        {"type": "text", "text": " upon é", "tokens": 3},
    ]
    done = lines[-1]
    assert done["type"] == "done"
    assert (done["finish_reason"], done["new_tokens"], done["seed"]) == ("eos", 3, 42)
    assert done["ttft_s"] == pytest.approx(summary.ttft_s, rel=1e-3)
    assert all(done[name] == float(f"{done[name]:.3e}") for name in ("ttft_s", "total_s", "prefill_tokens_per_s"))
    assert "é" in written(out)


def test_a_json_line_is_one_line_for_every_reader():
    text = "a\nb\u2028c\x85d\x1b\x7fe\u202ef é"
    line = json_line(type="text", text=text)
    assert line.splitlines() == [line[:-1]]
    assert not any(char in line for char in "\x1b\x7f\u202e")
    assert json.loads(line)["text"] == text


def test_on_one_terminal_only_text_and_statistics_remain():
    tty = Pty(180, 10)
    terminal = Terminal(tty.stream(), tty.stream(), stream(), {})
    terminal.wraps = True
    summary = play(text_renderer(terminal))
    output = tty.output()
    assert all(text in output for text in ("loading tiny [bold]", "0/1,000 tokens", "1 of at most 300 tokens"))
    assert Screen(180, 10).feed(output).lines() == ["Once upon é", statistics_line(summary)]


THOUGHTS = [
    Prefilled(0, 9),
    Prefilled(9, 9),
    Tokens((1,)),
    Thought("Two and", 1),
    Tokens((2,)),
    Thought(" two?\nYes.", 1),
]
THOUGHTS += [Tokens((3,)), Thought("", 1), Tokens((4,)), Text("Four"), Tokens((5,)), Text("."), Finished("eos")]


def screen_after(output, color="\x1b[2mTwo and\x1b[0m"):
    """What is left of the progress, from the first thought on; it is dimmed."""
    return Screen(120, 12).feed(output[output.index(color) :]).lines()


def test_thinking_is_above_the_answer_on_one_terminal():
    tty = Pty(120, 12)
    summary = play(text_renderer(Terminal(tty.stream(), tty.stream(), stream(), {})), THOUGHTS)
    assert screen_after(tty.output()) == ["Two and two?", "Yes.", "", "Four.", statistics_line(summary)]
    assert "5 written (3 of thinking)" in statistics_line(summary)


def summary(**changes) -> Summary:
    read = {"prompt_tokens": 6057, "prefilled_tokens": 6057, "prefill_s": 14.2, "prefill_tokens_per_s": 426.4}
    written = {"new_tokens": 200, "ttft_s": 14.3, "tbt_median_s": 0.046, "tbt_p95_s": 0.052, "tokens_per_s": 21.3}
    facts = {"finish_reason": "eos", "total_s": 24.0, "seed": 42, "sampling": None, "peak_memory_bytes": 966367641}
    return Summary(**(read | written | facts | changes))


NOTHING = dict.fromkeys(("prefill_s", "prefill_tokens_per_s", "ttft_s", "tbt_median_s", "tbt_p95_s", "tokens_per_s"))
NOTHING |= {"new_tokens": 0, "peak_memory_bytes": None, "seed": None, "finish_reason": "interrupted"}
READ = "6,057 tokens read in 14.2 s"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, f"{READ} · 200 written at 21/s"),
        ({"cached_tokens": 4096}, f"{READ} (4,096 from the cache) · 200 written at 21/s"),
        ({"finish_reason": "length"}, f"{READ} · 200 written at 21/s · stopped at the token limit"),
        ({"tokens_per_s": 1.25}, f"{READ} · 200 written at 1.2/s"),
        ({"new_tokens": 1, "tokens_per_s": None}, f"{READ} · 1 written"),
        ({"speedup": 1.44}, f"{READ} · 200 written at 21/s, about 1.4 times plain decoding"),
        ({"speedup": 0.951}, f"{READ} · 200 written at 21/s"),
        ({"speedup": 0.9}, f"{READ} · 200 written at 21/s, about 0.9 times plain decoding"),
        (NOTHING | {"prefilled_tokens": 512}, "512 of 6,057 tokens read · 0 written · interrupted"),
        ({"prefilled_tokens": 0}, "0 of 6,057 tokens read · 200 written at 21/s"),  # in the first chunk
    ],
)
def test_statistics_are_one_line_without_what_is_missing(changes, line):
    assert statistics_line(summary(**changes)) == line


def test_details_leave_out_what_is_missing():
    gained = summary(speedup=1.44, plain_step_s=0.05, cycle_s=0.062)
    parts = "1.44 times plain decoding · a plain step 50 ms · a draft and its verification 62 ms"
    assert f"gain      {parts}" in detail_lines(gained)
    assert not any(line.startswith("gain") for line in detail_lines(summary()))
    assert detail_lines(summary(**NOTHING)) == ["end       interrupted"]


@pytest.mark.parametrize("columns", [20, 80])
def test_statistics_are_never_wrapped_within_a_word(columns):
    tty = Pty(columns, 40)
    terminal = Terminal(stream(), tty.stream(), stream(), {"NO_COLOR": "1"})
    renderer = text_renderer(terminal, verbose=True)
    found = summary(**SPECULATION, cached_tokens=4096, link_bytes=10**9, link_utilisation=0.5)
    renderer.finish(found)
    terminal.error("there is no file book.txt", "the path is looked up from the folder of the command")
    output = tty.output()
    assert "\n".join(Screen(columns, 60).feed(output).lines()) == output.strip("\n")  # the terminal has wrapped nothing
    words = " ".join([statistics_line(found), *detail_lines(found)]).split()
    shown = [word for word in output.split() if word != "·"]
    assert shown[: len(words) - words.count("·")] == [word for word in words if word != "·"]


def test_details_for_verbose_alone():
    outputs = []
    for verbose in (False, True):
        out, err = stream(), stream()
        text_renderer(Terminal(out, err, stream(), {}), verbose=verbose).finish(summary(**SPECULATION, load_s=1.25))
        outputs.append(written(err).splitlines())
    assert outputs[0] == outputs[1][:1] == [statistics_line(summary())]
    assert outputs[1][1:] == [
        "method    auto · lookup→full 83 % (49 % of drafted) · draft→retrieval 40 % · 3.2 tokens/verification",
        "times     load 1.2 s · prefill 426/s · TTFT 14.3 s · TBT 46 ms (p95 52)",
        "end       end-of-sequence token",
        "seed      42",
        "memory    0.9 GiB at most",
    ]


SPECULATION = {
    "method": "auto",
    "verifications": 60,
    "tokens_per_verification": 3.21,
    "acceptance": {"lookup -> full": 0.83, "draft -> retrieval": 0.405},
    "accepted_of_drafted": {"lookup -> full": 0.49},
}


def test_verification_is_a_line_of_its_own():
    tie = {"position": 7, "emitted_text": " a", "expected_text": " an", "margin": 0.0, "noise": 0.1, "is_tie": True}
    found = {"compared_with": "ar on cpu", "tokens": 9, "equal": False, "lossless": True}
    found |= {"differing": 1, "divergences": [tie]}
    out, err = stream(), stream()
    json_renderer(Terminal(out, err, stream(), {})).finish(summary(verify=found))
    assert json.loads(written(out))["verify"] == found
    assert written(err).splitlines()[1] == (
        "verify: token 7 is ' a' where plain decoding has ' an' (margin 0, noise 0.1: a floating-point tie)"
        "; the rest of 9 tokens is equal (ar on cpu)"
    )
    with pytest.raises(TriforceError, match="more than rounding"):
        refuse_loss(found | {"lossless": False, "divergences": [tie | {"is_tie": False}]})


def decoding_line(verbose, method, rows, using, gain=None) -> str:
    """The status line of decoding, on a wide terminal."""
    meter = Meter(1000)
    for event in (Speculated(method, using, tuple(LevelStatistics(*row) for row in rows), gain), Tokens((1, 2, 3))):
        meter.observe(event)
    return progress.decoding_line(RunFacts(meter, 300, method), lambda: 150, verbose).plain


def test_the_status_line_shows_tokens_rate_and_gain_and_speculation_if_verbose():
    rows = [("none", "full", 1), ("lookup", "full", 3, 12, 10, 8)]
    short = "3 of at most 300 tokens · …/s"
    assert decoding_line(False, "auto", rows, "none", Gain(1.0, 1.02, 0.1)) == short
    gained = decoding_line(False, "auto", rows, "none", Gain(1.0, 2.1, 0.1))
    assert gained == f"{short} · about 2.1 times plain decoding"
    assert decoding_line(True, "auto", rows, "none") == f"{short} · auto: plain · lookup→full 80 % · 3.0/verification"
    rows = [("retrieval", "full", 4, 20, 18, 16), ("lookup", "retrieval", 5, 30, 25, 10)]
    line = decoding_line(True, "triforce", rows, "retrieval")
    assert line == f"{short} · triforce · retrieval→full 89 %, lookup→retrieval 40 % · 5.0/verification"
