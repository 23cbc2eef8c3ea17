"""The command in this process and in others, for all of its tests."""

import json
import subprocess

import pytest

from tests.support.command import COMMAND, environment


@pytest.fixture
def triforce(triforce_here):
    return triforce_here


@pytest.fixture
def process(tiny_model_dir, tmp_path):
    """The same as a process of its own: `process("generate", "hi") -> CompletedProcess` with text streams."""

    def run(*args, env=()):
        settings = environment(tmp_path, tiny_model_dir) | dict(env)
        command = [*COMMAND, *args]
        return subprocess.run(command, input="", capture_output=True, text=True, env=settings, timeout=500, check=False)

    return run


@pytest.fixture(scope="session")
def endless_model_dir(tiny_model_dir, tmp_path_factory):
    """The tiny model without an end-of-sequence token: it generates until the limit."""
    folder = tmp_path_factory.mktemp("endless")
    for file in tiny_model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    return folder
