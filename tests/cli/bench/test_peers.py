"""`triforce bench --ladder --peers`: other programs beside ours, in rows of the same report."""

import csv
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from offload.errors import SettingsError, TriforceError
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.settings.config import Sampling
from tests.support.command import refused
from tests.support.models import make_tokenizer
from triforce_cli.bench import peer_process
from triforce_cli.bench.peer import Task
from triforce_cli.bench.peer_endpoint import EndpointPeer
from triforce_cli.bench.peers import parse_peers
from triforce_cli.bench.read_times import ReadTimes

TEXT = "the cat and the dog and the cat and the dog and " * 40
LADDER = ("bench", TEXT, "--ladder", "150, 200", "--new", "8", "--repeats", "1", "--methods", "lookup")
FAKE_LLAMA = """
import os
class Llama:
    def __init__(self, path, n_ctx, **more):
        print("loading")  # is no answer
        if "broken" in path: raise ValueError("no GGUF file")
        self.read = []
    def set_seed(self, seed): self.seed = seed
    def reset(self): self.read = []
    def eval(self, ids):
        self.read += ids
        if len(self.read) > 20: raise RuntimeError("n_ctx is too small")
        if len(self.read) > 15: os.write(2, b"out of memory\\n"); os._exit(7)
    def sample(self, temp, top_p, top_k, min_p, **more): return len(self.read)
"""


class InThisProcess:
    """Stands for the process of a peer: the real program on the tiny model, without the seconds of a second import."""

    failing = 200  # tokens of a prompt

    def __init__(self, name, path, device, dtype, longest):
        self.program = peer_process.PROGRAMS[name](path, device, dtype, 1, longest)
        self.program.resident = 0

    def ask(self, request):
        if len(request[0]) == self.failing and request[2]["temperature"] > 0:
            raise TriforceError("it refuses the length")
        return peer_process.run(self.program, *request)

    def close(self):
        self.program = None


class Server(BaseHTTPRequestHandler):
    """Answers " nothing", in three pieces, with what it has cached; refuses fields that it does not know."""

    asked: ClassVar = []
    counted: ClassVar = {}
    takes_ids = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "test"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if "ignore_eos" in body or (isinstance(body["prompt"], list) and not self.takes_ids):
            self._send(b"unknown field", 400)
            return
        usage = {"completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0}, **self.counted}
        chunks = [{"choices": [{"text": piece}]} for piece in (" no", "", "th", "ing")] + [{"usage": usage}]
        self._send(b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in chunks) + b"data: [DONE]\n\n")

    def _send(self, data, code=200):
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Server.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_peers_stand_beside_ours(triforce_here, tmp_path, url, monkeypatch):
    monkeypatch.setattr("triforce_cli.bench.peers.Child", InThisProcess)
    points, page, table = tmp_path / "points.jsonl", tmp_path / "a.html", tmp_path / "a.csv"
    command = (*LADDER, "--peers", f"transformers,{url}", "--points", points, "--page", page)
    answer = triforce_here(*command, "--json", "--csv", table)
    assert answer.returncode == 0 and "transformers loads the model again: " in answer.stderr, answer.stderr
    steps = json.loads(answer.stdout)["steps"]
    rows = {name: [step for step in steps if step["method"] == name] for name in ("ar", "lookup", "transformers", url)}
    assert [len(each) for each in rows.values()] == [12] * 4 and len(steps) == 48
    for step in rows["transformers"]:
        is_greedy, failed = step["temperature"] == 0, step["temperature"] > 0 and step["context"] == 200
        assert step["is_peer"] and step["verdict"] == ("equal" if is_greedy else "failed" if failed else None)
        assert step["error"] == ("it refuses the length" if failed else None)
        assert (step["tokens_per_s"] is None) == failed and (failed or step["memory_bytes"] > 0)
    for step in rows[url]:
        assert (step["verdict"], step["differs_at"]) == (("different", 0) if step["temperature"] == 0 else (None, None))
        assert step["tokens_per_s"] > 0 and step["ttft_s"] > 0 and step["memory_bytes"] is None
    assert not any(step["is_peer"] for step in rows["ar"] + rows["lookup"])
    with table.open() as lines:
        assert [row["method"] for row in csv.DictReader(lines)] == [step["method"] for step in steps]
    assert "Other programs ran beside these" in page.read_text() and "different at 0" in page.read_text()

    assert len(points.read_text().splitlines()) == 48 - 3  # what failed is tried again
    monkeypatch.setattr(InThisProcess, "failing", 0)
    count = len(Server.asked)
    again = triforce_here(*command)
    assert again.returncode == 0 and len(points.read_text().splitlines()) == 48 and len(Server.asked) == count
    assert "failed" in answer.stdout and "failed" not in again.stdout


def test_an_endpoint_is_asked_for_the_text_without_fields_that_it_refuses(url, monkeypatch):
    class Model:
        tokenizer = Tokenizer.from_transformers(make_tokenizer())

    peer = EndpointPeer(f"{url}#mine")
    peer.open(Model, 100)
    ids = Model.tokenizer.encode(" nothing", special_tokens=False)
    found = peer.run(Task(ids, 9, Sampling(temperature=0.5, top_p=0.9), 3, [*ids[:4], ids[0]]))
    assert found.tokens == ids and found.measured["ttft_s"] > 0 and found.is_comparable
    assert len(Server.asked) == 2 and Server.asked[0]["ignore_eos"] is True
    expected = {"model": "mine", "prompt": " nothing", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    assert Server.asked[1] == expected | {"stream": True, "stream_options": {"include_usage": True}}
    others = Model.tokenizer.encode(" not", special_tokens=False) + Model.tokenizer.encode("hing", special_tokens=False)
    monkeypatch.setattr(Server, "counted", {"prompt_tokens": len(ids)})
    assert peer.run(Task(ids, 9, Sampling(), 3)).is_comparable
    monkeypatch.setattr(Server, "counted", {})
    assert others != ids and peer.run(Task(others, 9, Sampling(), 3)).is_comparable  # the same text
    assert Server.asked[-1]["prompt"] == others
    monkeypatch.setattr(Server, "takes_ids", False)
    assert not peer.run(Task(others, 9, Sampling(), 3)).is_comparable
    assert Server.asked[-1]["prompt"] == " nothing"
    monkeypatch.setattr(Server, "counted", {"prompt_tokens": len(ids) + 1})
    assert not peer.run(Task(ids, 9, Sampling(), 3)).is_comparable
    with pytest.raises(TriforceError, match="refused"):
        EndpointPeer("http://127.0.0.1:1/v1").open(Model, 100)


def test_the_first_token_of_a_prompt_that_an_endpoint_had_read_in_part():
    peer = EndpointPeer("http://127.0.0.1:1/v1")

    def usage(cached, tokens):
        return {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}

    assert peer._whole_read(usage(50, 100), 100, 1.0) is None  # read by somebody before
    assert peer._whole_read(usage(0, 100), 100, 4.0) == 4
    assert peer._whole_read(usage(50, 200), 200, 6.0) == pytest.approx(2 + 6)
    assert ReadTimes().knows(0) and not ReadTimes().knows(1)


def test_llama_cpp_in_a_process_of_its_own_that_dies(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").touch()
    (peer,) = parse_peers("llama.cpp=a.gguf")
    peer._load = ["a.gguf", "cpu", "float32", 30]
    try:
        first = peer.run(Task([1] * 5, 3, Sampling(temperature=0), 0))
        assert first.tokens == [5, 6, 7] and first.measured["tokens_per_s"] > 0
        assert first.measured["memory_bytes"] is None
        with pytest.raises(TriforceError, match="RuntimeError: n_ctx is too small"):
            peer.run(Task([1] * 21, 3, Sampling(temperature=0), 0))
        child = peer._child
        for _ in range(2):  # the second time it is not started anew
            with pytest.raises(TriforceError, match="its process ended with 7: out of memory"):
                peer.run(Task([1] * 16, 3, Sampling(temperature=0), 0))
            assert peer._child is None and child._process.returncode == 7
        assert peer.run(Task([1] * 4, 1, Sampling(temperature=0), 0)).tokens == [4]
    finally:
        peer.close()
    peer._load[0] = "broken.gguf"
    with pytest.raises(TriforceError, match="ValueError: no GGUF file"):
        peer.run(Task([1], 1, Sampling(temperature=0), 0))


def test_draws_of_transformers_follow_their_seed(tiny_model_dir):
    program = peer_process.Transformers(str(tiny_model_dir), "cpu", "float32", 1, 64)
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "min_p": 0.0}

    def drawn(seed):
        tokens = []
        program.generate(list(range(20)), 12, sampling, seed, tokens.append)
        return tokens

    assert len(drawn(1)) == 12 and drawn(1) == drawn(1) != drawn(2)


def test_peers_that_cannot_run_are_refused_before_the_model_is_loaded(triforce_here, tmp_path, monkeypatch):
    monkeypatch.setattr("triforce_cli.bench.measure._load_and_measure", None)
    monkeypatch.setattr("triforce_cli.bench.peers.find_spec", lambda name: None if name == "llama_cpp" else name)
    assert refused(triforce_here(*LADDER, "--peers", "transformer"), "there is no peer 'transformer'")
    assert refused(triforce_here(*LADDER, "--peers", "llama.cpp"), "needs llama-cpp-python, which is not installed")
    assert refused(triforce_here(*LADDER, "--peers", "llama.cpp=absent.gguf"), "there is no file absent.gguf")
    assert refused(triforce_here("bench", TEXT, "--peers", "transformers"), "--peers is of --ladder")
    assert refused(triforce_here(*LADDER, "--peers", "transformers", "--extend-context"), "the model's own context")
    monkeypatch.setattr("triforce_cli.bench.peers.find_spec", lambda name: name)
    assert refused(triforce_here(*LADDER, "--peers", "llama.cpp"), "--peers llama.cpp needs a .gguf file")
    with pytest.raises(SettingsError, match="no peer 'transformers=a"):
        parse_peers("transformers=a.gguf")
