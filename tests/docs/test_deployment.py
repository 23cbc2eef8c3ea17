"""The files for deployment fit the command: the Dockerfile, and examples for Kubernetes, torchrun and balancing."""

import json
import re
import subprocess
import sys

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
