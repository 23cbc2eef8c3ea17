"""Other programs that `bench --ladder --peers` measures beside ours. A new one is a row of KINDS. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.errors import SettingsError, TriforceError
from offload.hardware.schema import did_you_mean

from ..run.openai_client import is_endpoint
from .peer import Answer, Peer, Task
from .peer_endpoint import EndpointPeer

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel


class Kind(NamedTuple):
    """A program that runs in a process of its own: see `peer_process`."""

    module: str
    package: str
    takes_gguf: bool


KINDS = {
    "transformers": Kind("transformers", "transformers", takes_gguf=False),
    "llama.cpp": Kind("llama_cpp", "llama-cpp-python", takes_gguf=True),
}


def parse_peers(text: str) -> tuple[Peer, ...]:
    """Return the peers in a list with commas, each once. Raises SettingsError for unknown ones."""
    names = dict.fromkeys(part.strip() for part in text.split(","))
    return tuple(EndpointPeer(name) if is_endpoint(name) else _local(name) for name in names)


def _local(text: str) -> Local:
    name, _, file = text.partition("=")
    kind = KINDS.get(name)
    if kind is None or (file and not kind.takes_gguf):
        hint = f"{did_you_mean(name, KINDS)}peers: transformers, llama.cpp, llama.cpp=FILE.gguf, the URL of an endpoint"
        raise SettingsError(f"there is no peer {text!r}", hint)
    if file and not Path(file).is_file():
        raise SettingsError(f"--peers {text}: there is no file {file}", f"such as --peers {name}=model-Q4_K_M.gguf")
    if find_spec(kind.module) is None:
        hint = f"run: {sys.executable} -m pip install {kind.package}; or leave it out of --peers"
        raise SettingsError(f"--peers {name} needs {kind.package}, which is not installed", hint)
    return Local(name, kind, file)


class Local:
    """A program of KINDS in a process of its own, which lives from one run to the next."""

    def __init__(self, name: str, kind: Kind, file: str) -> None:
        self.name = name
        self._kind, self._file = kind, file
        self._load: list[Any] = []
        self._child: Child | None = None
        self._failed_at: tuple[int, TriforceError] | None = None  # the shortest prompt that ended its process

    @property
    def facts(self) -> dict[str, Any]:
        try:
            found = version(self._kind.package)
        except PackageNotFoundError:
            found = ""
        return {"name": self.name, "version": found, "file": self._file}

    def open(self, model: OpenModel, longest: int) -> None:
        path = Path(self._file) if self._file else model.checkpoint.path
        if self._kind.takes_gguf and not (path.is_file() and path.suffix == ".gguf"):
            hint = f"give it the same model with {self.name}=FILE.gguf"
            raise SettingsError(f"--peers {self.name} needs a .gguf file, and {path.name} is none", hint)
        if not self._kind.takes_gguf and not (path / "config.json").is_file():
            hint = "leave it out of --peers, or give --model a folder or a model of the hub"
            raise SettingsError(f"--peers {self.name} needs a folder with config.json, and {path.name} is none", hint)
        self._load = [str(path), str(model.device), str(model.dtype).removeprefix("torch."), longest]

    def run(self, task: Task) -> Answer:
        if self._failed_at is not None and len(task.ids) >= self._failed_at[0]:
            raise self._failed_at[1]
        try:
            if self._child is None:
                self._child = Child(self.name, *self._load)
            found = self._child.ask([*task[:2], task.chosen, task.seed])
        except Died as error:
            self._failed_at = len(task.ids), error
            self.close()
            raise
        return Answer(found["measured"], found["tokens"])

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None


class Died(TriforceError):
    """The process of a peer has ended, or has no model loaded."""


class Child:
    """A process with a program loaded, and the same import path as this one. Raises Died."""

    def __init__(self, name: str, path: str, device: str, dtype: str, longest: int) -> None:
        import torch

        code = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.peer_process import main; main()"
        self._name = name
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the parent alone, which ends it
        )
        try:
            self.ask([name, path, device, dtype, torch.get_num_threads(), longest])
        except BaseException as error:
            self.close()
            raise Died(error.message) if isinstance(error, TriforceError) else error from error

    def ask(self, request: list[Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises TriforceError with what the program says."""
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None, "both are pipes"
        try:
            pipes[0].write(json.dumps(request) + "\n")
            pipes[0].flush()
            line = pipes[1].readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Died(f"its process ended with {self._process.wait()}{self._last_message()}")
        found = json.loads(line)
        if "error" in found:
            raise TriforceError(found["error"])
        return found

    def _last_message(self) -> str:
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:200]}" if last else ""

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._messages):
            try:
                file.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                pass
