"""The files for deployment fit the command: the Dockerfile, and examples for Kubernetes, torchrun and balancing."""

import asyncio
import json
import re
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
import yaml

from tests.support.command import COMMAND, environment
from tests.support.paths import ROOT
from triforce_cli.serve.serve_options import DRAIN, PORT

EXAMPLES = ROOT / "examples"


def instructions():
    """The instructions of the Dockerfile: their names and their texts."""
    text = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text())
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_dockerfile_names_what_is_there():
    found = instructions()
    runs = " ".join(text for name, text in found if name == "RUN")
    extras = re.search(r"\.\[([a-z,]+)\]", runs)[1].split(",")
    assert all(re.search(rf"^{each} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for each in extras)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [text for name, text in found if name == "EXPOSE"] == [str(PORT)]
    python = {re.match(r"python:([\d.]+)-slim", text)[1] for name, text in found if name == "FROM"}
    assert python == {"3.11"}  # that of constraints.txt
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"offload", "triforce_cli", "profiles", "setup.py", "docs"} & set(ignored)


def test_the_image_s_command_asks_for_a_key(triforce_here, monkeypatch):
    command = json.loads(next(text for name, text in instructions() if name == "CMD"))
    result = triforce_here(*command)
    assert result.returncode == 2 and "TRIFORCE_API_KEY" in result.stderr


def test_the_example_for_kubernetes_asks_what_the_server_answers(triforce_here):
    kinds = {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}
    assert kinds.keys() == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = kinds["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: each["path"] for name, each in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    source = (ROOT / "triforce_cli" / "serve" / "app.py").read_text()
    assert all(f'{each["path"]}", self._' in source for each in probes.values())
    assert {each["port"] for each in probes.values()} == {container["ports"][0]["name"]}
    options = dict(zip(container["args"][1::2], container["args"][2::2], strict=True))
    help = triforce_here("serve", "--help-all").stdout
    assert all(name in help for name in options)
    assert options["--port"] == str(container["ports"][0]["containerPort"]) == str(PORT)
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(options["--drain"]) == DRAIN
    user = next(text for name, text in instructions() if name == "USER")
    assert pod["spec"]["securityContext"]["runAsUser"] == int(user)
    assert kinds["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert container["volumeMounts"][0]["mountPath"] in [text for name, text in instructions() if name == "VOLUME"]


balance = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "balance.py")))
SERVERS = [f"http://10.0.0.{number}:8000" for number in range(4)]


def body(document, question, **more):
    return {"messages": [{"role": "user", "content": f"{document * 300}\n\n{question}"}]} | more


def chosen(servers, *request, **more):
    return balance.by_prefix(servers, json.dumps(body(*request, **more)).encode())


def test_questions_about_one_document_have_one_server_and_documents_many():
    for document in ("a story ", "a report "):
        assert len({tuple(chosen(SERVERS, document, f"{n}?", stream=bool(n % 2))) for n in range(5)}) == 1
    firsts = [chosen(SERVERS, f"document {n} ", "Who?")[0] for n in range(200)]
    assert all(20 < firsts.count(server) < 90 for server in SERVERS)
    left = SERVERS[1:]
    moved = [chosen(left, f"document {n} ", "Who?")[0] for n in range(200)]
    assert all(a == b for a, b in zip(firsts, moved, strict=True) if a != SERVERS[0])
    assert balance.by_prefix(SERVERS, b"no JSON") == balance.by_prefix(SERVERS, b"[]")


class Server(BaseHTTPRequestHandler):
    """Answers with the name of the server and what it was sent; `ready` may be False."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._send(200 if self.server.ready else 503, b"{}")

    def do_POST(self):
        sent = self.rfile.read(int(self.headers["content-length"]))
        answer = {"server": self.server.server_port, "sent": json.loads(sent), "key": self.headers["authorization"]}
        self._send(200, json.dumps(answer).encode())

    def _send(self, status, data):
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *more):
        pass


def test_a_server_that_is_not_ready_is_passed_over(monkeypatch):
    monkeypatch.setattr(balance, "CONNECT", 60.0)
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Server) for _ in range(2)]
    for server in servers:
        server.ready = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]

    async def ask(client, *request):
        answer = await client.post("/v1/chat/completions", json=body(*request), headers={"authorization": "Bearer k"})
        return answer.status_code, answer.json() if answer.content else None

    async def run():
        listening = await asyncio.start_server(
            lambda *streams: balance.answer(*streams, lambda sent: balance.by_prefix(urls, sent)), "127.0.0.1", 0
        )
        port = listening.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=60) as client:
            first = await asyncio.gather(*[ask(client, "a story ", f"{n}?") for n in range(4)])
            assert {code for code, _ in first} == {200} and len({found["server"] for _, found in first}) == 1
            assert first[0][1]["sent"] == body("a story ", "0?") and first[0][1]["key"] == "Bearer k"
            own = next(each for each in servers if each.server_port == first[0][1]["server"])
            own.ready = False
            code, found = await ask(client, "a story ", "And then?")
            assert code == 200 and found["server"] != own.server_port
            for server in servers:
                server.ready = False
            assert (await ask(client, "a story ", "And now?"))[0] == 503
        listening.close()

    asyncio.run(run())
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.long
def test_the_recipe_for_torchrun_is_one_group(tiny_model_dir, tmp_path):
    """The recipe of examples/, with an `srun` that runs two tasks on this machine."""
    tasks = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID SLURM_NNODES=2; "$@" & pids="$pids $!"; done'
    scripts = {
        "srun": f"{tasks}; for pid in $pids; do wait $pid || code=$?; done; exit ${{code:-0}}",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "triforce": f'exec {" ".join(COMMAND)} "$@"',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    from tests.support.rank_pool import free_port

    variables = environment(tmp_path, tiny_model_dir)
    variables |= {"PATH": f"{tmp_path}:{variables['PATH']}", "FIRST": "127.0.0.1", "PORT": str(free_port())}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "TRIFORCE_DTYPE": "float32"}
    asked = ["generate", "Once upon a time", "-n", "8", "--temperature", "0"]
    alone = subprocess.run([*COMMAND, *asked], env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    recipe = [str(EXAMPLES / "torchrun.sbatch"), *asked]
    done = subprocess.run(recipe, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone.stdout
