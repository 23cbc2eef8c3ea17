"""`triforce bench --ladder`: all methods by length, for three kinds of output, with a page."""

import json
from xml.etree import ElementTree

import pytest

from offload.events import LevelStatistics, Prefilled, Speculated, Tokens
from offload.metrics import Meter
from tests.support.command import refused
from triforce_cli.bench.ladder import OUTPUTS, in_order, mean_by, positions, same_answers, verdict, with_outputs
from triforce_cli.bench.measurement import ReadTimes
from triforce_cli.bench.positions import PART, Positions

TEXT = "the cat and the dog and the cat and the dog and " * 40
LADDER = (
    "--ladder",
    "150, 200",
    "--new",
    "8",
    "--repeats",
    "1",
    "--methods",
    "retrieval",
    "--budget",
    "64",
    "--sink",
    "4",
    "--window",
    "16",
)


@pytest.fixture(scope="module")
def outputs():
    return list(OUTPUTS)


def test_the_ladder_and_its_page(triforce_here, tmp_path, outputs, monkeypatch):
    monkeypatch.setattr(ReadTimes, "add", lambda self, meter: 100.0)  # seconds of reading, whatever was there before
    points, page = tmp_path / "points.jsonl", tmp_path / "ladder.html"
    command = ("bench", TEXT, *LADDER, "--points", points)
    answer = triforce_here(*command, "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["type"] == "bench_ladder" and found["axes"] == {"context": [150, 200], "temperature": [0.0, 0.8]}
    steps = found["steps"]
    assert len(steps) == 2 * 3 * 2 * 2 == len(points.read_text().splitlines())
    assert [step["output"] for step in steps[::4]] == outputs * 2  # one length after the other
    assert [step["filled"] for step in steps[:12]] == [158] * 12 and steps[-1]["filled"] == 208
    for plain, drafted in zip(steps[::2], steps[1::2], strict=True):
        assert (plain["method"], drafted["method"]) == ("ar", "retrieval")
        assert (plain["verdict"], drafted["verdict"]) == (None, "equal")
        assert plain["drafter"] == "-" and drafted["memory_bytes"] > 0 and drafted["kv"] == "auto (float32)"
        assert drafted["draft_positions"] and not plain["draft_positions"]
        verified = sum(of for of, _ in drafted["draft_positions"])
        assert verified == sum(of for of, _ in drafted["answer_positions"])
        assert 100 <= plain["ttft_s"] < 200 and 100 <= drafted["ttft_s"] < 200

    before = points.read_text()
    answer = triforce_here(*command, "--page", page)  # of what was kept
    assert (answer.returncode, points.read_text()) == (0, before)
    assert "the same answer as plain decoding" in answer.stdout
    assert answer.stdout.splitlines()[-4].split() == ["retrieval", "200", "6", "0", "0", "-"]
    text = page.read_text()
    pictures = [f"<svg{each.partition('</svg>')[0]}</svg>" for each in text.split("<svg")[1:]]
    titles = [ElementTree.fromstring(each)[0].text for each in pictures]
    assert titles[:3] == ["seconds to the first token", "speed-up over plain decoding", "tokens a pass"]
    assert "accepted, by position in the draft" in titles
    assert text.count("<tr>") == (1 + 2) + (1 + 24) and "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_what_does_not_go_with_the_ladder(triforce_here, tmp_path):
    assert refused(triforce_here("bench", TEXT, *LADDER, "--context", "100"), "--context does not go with --ladder")
    assert refused(triforce_here("bench", TEXT, "--ladder", "1K,x"), "--ladder is '1K,x'")
    assert refused(triforce_here("bench", TEXT, "--ladder", "90K"), "fewer than --ladder 92,160", "use --ladder ")
    assert refused(triforce_here("bench", TEXT, *LADDER, "--quality"), "--quality does not go with --ladder")
    assert refused(triforce_here("bench", TEXT, *LADDER, "--budget", "64,128"), "--budget takes one value")
    assert refused(triforce_here("bench", TEXT, "--ladder", "4K,9x"), "--ladder is '4K,9x': '9x' is not a number")
    assert refused(triforce_here("bench", TEXT, "--page", tmp_path / "a.html"), "--page is of --ladder")
    missing = tmp_path / "missing" / "a.html"
    assert refused(triforce_here("bench", TEXT, *LADDER, "--page", missing), "there is no folder")
    assert refused(triforce_here("bench", TEXT, *LADDER, "--page", tmp_path / "a.png"), "--page writes HTML")


def test_each_text_has_three_kinds_of_output_next_to_each_other(outputs):
    texts, endings = with_outputs([("a", "A"), ("b", "B")])
    assert [name for name, _ in texts[:3]] == [f"a · {each}" for each in outputs] and len(endings) == 6
    places = [(prompt, context) for prompt in range(6) for context in (100, 200)]
    assert in_order(places)[:6] == [(0, 100), (1, 100), (2, 100), (0, 200), (1, 200), (2, 200)]
    assert in_order(places)[6] == (3, 100)


def test_verdicts_and_their_counts():
    row = {"method": "auto", "context": 4096, "equals_ar": True, "lossless": None, "margin": None}
    rows = [row, row | {"equals_ar": False, "lossless": True, "margin": 0.1}]
    rows += [row | {"equals_ar": False, "lossless": False, "margin": 2.0}, row | {"method": "ar"}]
    rows = [each | {"verdict": verdict(each)} for each in rows]
    assert [each["verdict"] for each in rows] == ["equal", "tie", "different", None]
    counts = {"equal": 1, "tie": 1, "different": 1, "margin": 2.0}
    assert same_answers(rows) == [{"method": "auto", "context": 4096, **counts}]


def test_rates_by_position_and_means_by_length():
    row = {"method": "auto", "context": 4096, "draft_positions": [[8, 6], [6, 1]], "speedup": 2.0, "output": "summary"}
    rows = [row, row | {"draft_positions": [[12, 9]], "speedup": 1.0, "output": "question"}]
    assert positions(rows, "draft_positions") == {"auto": [0.75, None]}  # of 6 verified tokens nothing is said
    assert mean_by(rows, "speedup") == {"auto": [(4096, 1.5)]}
    assert mean_by(rows, "speedup", output="question") == {"auto": [(4096, 1.0)]}


def test_positions_from_the_events_of_a_run():
    def speculated(drafted, accepted):
        middle = LevelStatistics("lookup", "retrieval", drafted=99)
        return Speculated("auto", "lookup", (LevelStatistics("lookup", "full", 1, drafted, 0, accepted), middle))

    events = [Tokens((1,)), speculated(4, 2), Tokens((1, 2, 3)), speculated(6, 4), Tokens(tuple(range(PART)))]
    events += [speculated(6, 4), Tokens((1,)), speculated(9, 5)]
    found = Positions()
    assert list(found.watch(events)) == events
    assert found.in_draft == [[3, 3], [3, 2], [1, 0]]  # 2 of 4, both of 2, none after that, 1 of 3
    assert found.in_answer == [[5, 4], [2, 1]]


def test_seconds_of_reading_a_prompt_whose_beginning_was_read_before():
    now = [0.0]

    def read(cached, tokens, seconds):
        meter = Meter(tokens, lambda: now[0])
        meter.observe(Prefilled(cached, tokens))
        now[0] += seconds
        meter.observe(Prefilled(tokens, tokens))
        return meter

    times = ReadTimes()
    assert times.add(read(0, 100, 4.0)) == 4
    assert times.add(read(90, 100, 1.0)) == pytest.approx(3.6 + 1)  # another end
    assert times.add(read(90, 300, 20.0)) == pytest.approx(3.6 + 20)
    assert times.add(read(0, 50, 1.5)) == 1.5  # another text
