"""`triforce evaluate`, on a model with planted induction heads, whose exact score is known to be 1."""

import csv
import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from offload.engine import Engine
from offload.errors import TriforceError
from offload.evaluation.tasks.task import Item
from scripts.planted_model import write
from tests.support.command import assert_error, refused
from tests.support.models import make_tokenizer
from tests.support.offloading import native_kernel
from triforce_cli.evaluate import run
from triforce_cli.evaluate.report import Evaluation
from triforce_cli.evaluate.report_text import evaluation_text, heat_map
from triforce_cli.evaluate.request import CHATTY, parse_depths
from triforce_cli.evaluate.targets import Endpoint
from triforce_cli.output.progress import ProgressDisplay

TASKS = ("--tasks", "single,quotation", "--context", "256", "--depths", "2")
SMALL = ("--budget", "100", "--set", "sink=4", "--set", "window=24")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    write(folder)
    return folder


def scores_of(answer):
    """Return the records of --json, and the scores of all tasks by mode."""
    assert answer.returncode == 0, answer.stderr
    *records, report = map(json.loads, answer.stdout.splitlines())
    assert report["type"] == "evaluation"
    return records, {row["mode"]: row for row in report["rows"] if row["task"] == "all"}, report


@pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")
def test_modes_that_drop_tokens_lose_what_was_there(triforce_here, planted, tmp_path):
    modes = ("--modes", "streaming-llm,kv=q8", *SMALL, "--dtype", "bfloat16", "--points", tmp_path / "points.jsonl")
    command = ("evaluate", "--model", planted, *TASKS, *modes)
    records, rows, report = scores_of(triforce_here(*command, "--json"))
    assert list(rows) == ["exact", "streaming-llm", "kv=q8"] and len(records) == 3 * 4
    assert rows["exact"]["score"] == 1 and rows["kv=q8"]["score"] == 1
    assert rows["streaming-llm"]["score"] == 0.5  # what lies early is gone
    assert (rows["streaming-llm"]["difference"], rows["exact"]["difference"]) == (-0.5, None)
    assert rows["exact"]["interval"] == pytest.approx([0.51, 1], abs=0.01)
    cells = {(cell["mode"], cell["depth"]): cell["score"] for cell in report["cells"]}
    assert (cells["streaming-llm", 0.25], cells["streaming-llm", 0.75]) == (0, 1)
    assert all(record["prompt_tokens"] <= 256 for record in records)

    answer = triforce_here(*command)  # of what was kept
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert any(line.split()[:5] == ["quotation", "100", "(34-100)", "50", "(9-91)"] for line in lines)
    assert lines[lines.index("streaming-llm, by length and depth") + 2].split() == ["256", "0", "100"]
    assert any(line.startswith("streaming-llm against exact: -50.0 points") for line in lines)
    assert not any("no prompt is longer" in line for line in lines)


def test_finished_answers_are_kept_and_the_same_command_goes_on(triforce_here, planted, tmp_path):
    points, table = tmp_path / "points.jsonl", tmp_path / "scores.csv"
    command = ("evaluate", "--model", planted, "--context", "200", "--depths", "1", "--points", points, *SMALL)
    first, _, _ = scores_of(triforce_here(*command, "--tasks", "single", "--modes", "exact", "--json"))
    before = points.read_text()
    again, rows, _ = scores_of(
        triforce_here(*command, "--tasks", "single,multikey", "--modes", "exact", "--json", "--csv", table)
    )
    assert points.read_text().startswith(before) and len(points.read_text().splitlines()) == 2
    assert again[0] == first[0] and rows["exact"]["items"] == 2
    lines = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [line["task"] for line in lines] == ["single", "multikey"] and {line["score"] for line in lines} == {"1.0"}
    other = ("--modes", "streaming-llm", "--tasks", "single")
    scores_of(triforce_here(*command, *other, "--json"))
    scores_of(triforce_here(*command, *other, "--budget", "70", "--json"))  # which the mode reads
    assert len(points.read_text().splitlines()) == 4


def test_a_report_says_which_caches_dropped_nothing():
    place = {"task": "single", "length": 99, "depth": 0.5, "seed": 0, "score": 1.0}
    settings = {"h2o": (1000, 1000), "retrieval": (1025, None), "streaming-llm": (1024, None), "exact": (9, None)}
    records = [
        {**place, "mode": mode, "prompt_tokens": tokens, "settings": {"approximate": approximate, "budget": budget}}
        for mode, (tokens, budget) in settings.items()
        for approximate in [None if mode == "exact" else mode]
    ]
    facts = {"machine": {"name": "a", "engine": "b"}, "model": "c"}
    text = str(evaluation_text(Evaluation(None, facts, records), 100))
    assert "no prompt is longer than what h2o, streaming-llm keep: take a longer --context" in text
    narrow = str(evaluation_text(Evaluation(None, facts, records), 40)).splitlines()
    assert max(map(len, narrow)) <= 40


def test_the_colours_of_a_heat_map():
    cells = [
        {"mode": "exact", "length": 256, "depth": depth, "score": score} for depth, score in ((0.5, 0.0), (1, 1.0))
    ]
    (found,) = heat_map(cells, ["exact"])
    styles = [str(span.style) for span in found.spans]
    assert any("red" in style for style in styles) and any("green" in style for style in styles)


def test_a_text_of_the_user(triforce_here, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("The cat sat. The dog ran! " * 200)
    command = ("evaluate", "-f", book, "--tasks", "single", "--depths", "1", "--modes", "exact", "--json")
    (record,), _, _ = scores_of(triforce_here(*command, "--context", "200"))
    assert record["task"] == "single" and 0 <= record["score"] <= 1
    book.write_text("The cat sat.")
    assert_error(triforce_here(*command, "--context", "200"), 2, "too short for 200 tokens")


def test_map_reduce_reads_in_parts(triforce_here):
    command = ("evaluate", "--tasks", "single", "--depths", "1", "--context", "700", "--json")
    records, rows, _ = scores_of(triforce_here(*command, "--modes", "map-reduce=1100"))
    assert list(rows) == ["exact", "map-reduce=1100"] and records[1]["settings"]["part"] == 1100
    answer = triforce_here(*command, "--modes", "map-reduce=50")
    assert answer.returncode == 2 and "try larger parts, such as map-reduce=2K" in answer.stderr


def test_a_chat_asks_in_the_template(triforce_here, monkeypatch):
    prompts, generate = [], Engine.generate

    def observed(self, ids, *rest):
        prompts.append(ids)
        return generate(self, ids, *rest)

    monkeypatch.setattr(Engine, "generate", observed)
    command = ("evaluate", "--tasks", "single", "--depths", "1", "--context", "300", "--modes", "exact", "--json")
    (record,), _, _ = scores_of(triforce_here(*command, "--chat"))
    said = make_tokenizer().decode(prompts[0])
    assert said.startswith("<|im_start|>user\n")
    assert said.endswith("What is the pass key?<|im_end|>\n<|im_start|>assistant\nThe pass key is")
    assert record["settings"]["is_chat"] and len(prompts[0]) == record["prompt_tokens"] <= 300


def test_ctrl_c_writes_what_is_done(triforce_here, tmp_path, monkeypatch):
    answered, done = run._answered, []

    def interrupted(*args):
        if done:
            raise KeyboardInterrupt
        done.append(args)
        return answered(*args)

    monkeypatch.setattr(run, "_answered", interrupted)
    command = ("evaluate", "--tasks", "single", "--depths", "3", "--context", "200", "--modes", "exact")
    answer = triforce_here(*command, "--points", tmp_path / "points.jsonl")
    assert answer.returncode == 130 and "1 item" in answer.stdout
    assert "interrupted; 1 answer saved: run the same command again to go on" in answer.stderr
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 1


def test_modes_that_cannot_run_are_left_out_unless_they_are_named(triforce_here):
    command = ("evaluate", "--tasks", "single", "--depths", "1", "--context", "200", "--json")
    narrow = ("--budget", "48", "--set", "sink=4", "--set", "window=44")  # which leaves h2o no token to rank
    answer = triforce_here(*command, *narrow)
    _, rows, _ = scores_of(answer)
    assert "exact" in rows and "h2o" not in rows and "warning: h2o is left out: the budget of 48" in answer.stderr
    assert_error(triforce_here(*command, *narrow, "--modes", "h2o"), 2, "the budget of 48 tokens leaves none")


def test_wrong_names(triforce_here):
    assert_error(triforce_here("evaluate", "--tasks", "singel"), 2, "no task 'singel'", "did you mean single?")
    assert_error(triforce_here("evaluate", "--tasks", ""), 2, "no task ''")
    assert_error(triforce_here("evaluate", "--modes", ""), 2, "no mode ''")
    assert_error(triforce_here("evaluate", "--modes", "exact,h20"), 2, "no mode 'h20'", "map-reduce, or the URL")
    assert_error(triforce_here("evaluate", "--modes", "recompute"), 2, "bench --quality")
    assert_error(triforce_here("evaluate", "--context", "20", "--modes", "exact"), 2, "too few for")


def test_what_is_made_is_shown(triforce_here, monkeypatch):
    """Items of 64K tokens take seconds each to make, before a model is loaded."""
    shown = []
    monkeypatch.setattr(ProgressDisplay, "loading", lambda display, text: shown.append(text))
    command = ("evaluate", "--tasks", "single", "--context", "200", "--depths", "4")
    scores_of(triforce_here(*command, "--modes", "exact", "--json"))
    assert shown[:5] == ["starting", *(f"making item {number} of 4" for number in range(1, 5))] != shown


def test_a_length_beyond_the_context_is_refused_before_items_are_made(triforce_here, monkeypatch):
    monkeypatch.setattr("triforce_cli.evaluate.run.make_items", None)
    answer = triforce_here("evaluate", "--context", "1M", "--modes", "exact")
    assert_error(answer, 2, "1,048,576 tokens", "context of 2,048")
    answer = triforce_here("evaluate", "--context", "200,300", "--modes", "exact")
    assert_error(answer, 2, "200,300 tokens", 'for two contexts: --context "200, 300"')


class _Server(BaseHTTPRequestHandler):
    """Answers with the last number of seven digits in a prompt; it has no /completions if its path begins so."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._send({"data": [{"id": "test"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/chat/v1/completions":
            self._send({"error": "not here"}, 404)
            return
        text = body.get("prompt") or body["messages"][0]["content"]
        assert body["model"] == "test" and body["temperature"] == 0
        key = text.split("The pass key is ")[1][:7]
        chat = {"message": {"content": f"It is {key}."}}
        self._send({"choices": [chat if "messages" in body else {"text": f" {key}"}]})

    def _send(self, value, code=200):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["/v1", "/chat/v1"])
def test_an_endpoint(triforce_here, server, path):
    url = server + path
    command = ("evaluate", "--tasks", "single", "--depths", "1", "--context", "200", "--modes", url, "--json")
    (record,), rows, _ = scores_of(triforce_here(*command))
    assert (record["mode"], record["score"], record["settings"]["model"]) == (url, 1, "test")
    assert rows[url]["difference"] is None


def test_an_error_of_a_mode_ends_that_mode_alone(triforce_here, server, tmp_path, monkeypatch):
    posts, post = [], _Server.do_POST

    def posted(self):
        posts.append(self.path)
        if posts.count("/v1/completions") > 1 and posts[-1] == "/v1/completions":
            self.rfile.read(int(self.headers["Content-Length"]))
            return self._send({"error": "out of memory"}, 500)
        return post(self)

    monkeypatch.setattr(_Server, "do_POST", posted)
    table = tmp_path / "scores.csv"
    command = ("evaluate", "--tasks", "single", "--depths", "3", "--context", "200", "--csv", table)
    answer = triforce_here(*command, "--modes", f"{server}/v1,{server}/chat/v1")
    assert answer.returncode == 1 and "out of memory" in answer.stderr
    modes = [line["mode"] for line in csv.DictReader(io.StringIO(table.read_text()))]
    assert modes == [f"{server}/v1"] + [f"{server}/chat/v1"] * 3
    assert "score of 100" in answer.stdout


def test_depths_are_a_number_or_percentages(triforce_here):
    help = " ".join(triforce_here("evaluate", "--help").stdout.replace("│", "").split())
    assert (
        "--context N,... Tokens of each text: 8000, 16K. (4K) --depths N|LIST How many, or which: 10%,90%. (5)" in help
    )
    assert parse_depths("2") == (0.75, 0.25)
    assert parse_depths("50%") == (0.5,) and parse_depths("10 %, 99.5%,10%") == (0.995, 0.1)
    for text in ("0", "101", "50,60", "101%", "50%,", ""):
        refused(triforce_here("evaluate", "--depths", text), f"--depths is {text!r}", "from 1 to 100", "10%,50%,90%")


def test_an_endpoint_that_is_not_there(triforce_here):
    answer = triforce_here("evaluate", "--tasks", "single", "--modes", "http://127.0.0.1:1/v1", "--context", "200")
    assert_error(answer, 1, "http://127.0.0.1:1/v1/models", "does it run?")


def test_an_endpoint_whose_answers_are_none(server, monkeypatch):
    item = Item(None, 200, 0.5, 0, "The pass key is 1234567.", "What is it?", "It is", ("1234567",), 10)
    sent = []

    def send(answers):
        def sending(self, value, code=200):
            plain(self, answers if "choices" in value or "data" in value else value, code)

        monkeypatch.setattr(_Server, "_send", sending)

    def posted(self):
        length = int(self.headers["Content-Length"])
        sent.append(json.loads(self.rfile.read(length)))
        self._send({"choices": []})

    plain = _Server._send
    monkeypatch.setattr(_Server, "do_POST", posted)
    chat = Endpoint(f"{server}/v1#test", is_chat=True)
    with chat.answering() as answer:
        send({"choices": [{"message": {"content": None}}]})
        assert answer(item) == "" and sent[-1]["max_tokens"] == 10 + CHATTY  # as the model's own chats
        for other in ({"choices": []}, {"error": "busy"}, [], 7):
            send(other)
            with pytest.raises(TriforceError, match="chat/completions: its JSON has no content"):
                answer(item)
    with pytest.raises(TriforceError, match="models: its JSON has no id"):
        _ = Endpoint(f"{server}/v1").facts


def test_an_endpoint_that_speaks_no_http():
    with pytest.raises(TriforceError, match="nonnumeric port"):
        _ = Endpoint("http://127.0.0.1:8000x/v1").facts
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hello():
            connection = listener.accept()[0]
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-test\r\n")

        thread = threading.Thread(target=hello, daemon=True)
        thread.start()
        with pytest.raises(TriforceError, match="SSH-2"):
            _ = Endpoint(f"http://127.0.0.1:{port}/v1").facts
        thread.join()
