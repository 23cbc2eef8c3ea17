"""Other programs that `bench --ladder --peers` measures beside ours. A new one is a row of KINDS. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from offload.errors import SettingsError, TriforceError
from offload.hardware.schema import did_you_mean
from offload.settings.generation import Sampling

from ..run.openai_client import NotThere, OpenAIClient, Refused, is_endpoint
from .read_times import Read, ReadTimes

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
READ = ("temperature", "top_p", "top_k", "min_p")  # what peers read of how tokens are sampled
_EXTRAS = {"ignore_eos": True, "cache_prompt": False}  # fields that some endpoints have


class Task(NamedTuple):
    """What a peer is to generate. `expected` is plain decoding's answer, where it is known."""

    ids: Sequence[int]
    new_tokens: int
    sampling: Sampling
    seed: int
    expected: Sequence[int] | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.sampling).items() if name in READ}


class Answer(NamedTuple):
    """What a peer measured, by the names of a run's measures, and its tokens; whether ours may be compared."""

    measured: dict[str, Any]
    tokens: list[int]
    is_comparable: bool = True


class Peer(Protocol):
    """A program to measure. `facts` and what runs raise TriforceError."""

    name: str

    @property
    def facts(self) -> dict[str, Any]:
        """Return what its runs depend on, beside the request."""
        ...

    def open(self, model: OpenModel, longest: int) -> None:
        """Check that it can run a model, for sequences of up to `longest` tokens. Raises TriforceError."""
        ...

    def run(self, task: Task) -> Answer:
        """Generate once."""
        ...

    def close(self) -> None:
        """Release what it holds; the next run begins anew."""
        ...


def parse_peers(text: str) -> tuple[Peer, ...]:
    """Return the peers in a list with commas, each once. Raises SettingsError for unknown ones."""
    names = dict.fromkeys(part.strip() for part in text.split(","))
    return tuple(Endpoint(name) if is_endpoint(name) else _local(name) for name in names)


def _local(text: str) -> Local:
    name, _, file = text.partition("=")
    kind = KINDS.get(name)
    if kind is None or (file and not kind.takes_gguf):
        hint = f"{did_you_mean(name, KINDS)}peers: transformers, llama.cpp, llama.cpp=FILE.gguf, the URL of an endpoint"
        raise SettingsError(f"there is no peer {text!r}", hint)
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


class Endpoint:
    """An OpenAI endpoint by its URL. Its text is compared, in our tokens; of its memory nothing is known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._client, self._reads, self._extras = OpenAIClient(name), ReadTimes(), _EXTRAS
        self._is_chat = False

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "model": self._client.model}

    def open(self, model: OpenModel, longest: int) -> None:
        self._tokenizer = model.tokenizer
        _ = self._client.model  # asks for it

    def run(self, task: Task) -> Answer:
        text = self._tokenizer.decode(task.ids)
        body = {"model": self._client.model, "max_tokens": task.new_tokens, "seed": task.seed}
        optional = {name: task.chosen[name] for name in ("top_k", "min_p") if task.chosen[name]}  # not all know these
        body |= {"temperature": task.sampling.temperature, "top_p": task.sampling.top_p} | optional
        body |= {"stream_options": {"include_usage": True}}
        began = time.perf_counter()
        try:
            pieces, usage = self._read(text, body)
        except Refused:
            if not self._extras:
                raise
            self._extras = {}
            return self.run(task)
        except NotThere:
            if self._is_chat:
                raise
            self._is_chat = True
            return self.run(task)
        return self._answer(task, [(at - began, piece) for at, piece in pieces], usage, time.perf_counter() - began)

    def close(self) -> None:
        """Do nothing: every request has its own connection."""

    def _read(self, text: str, body: dict[str, Any]) -> tuple[list[tuple[float, str]], Mapping[str, Any]]:
        """Return the pieces of an answer and when they arrived, and what the endpoint says of its tokens."""
        pieces: list[tuple[float, str]] = []
        usage: Mapping[str, Any] = {}
        path = "chat/completions" if self._is_chat else "completions"
        asked = {"messages": [{"role": "user", "content": text}]} if self._is_chat else {"prompt": text}
        for found in self._client.stream(path, body | self._extras | asked):
            usage = found.get("usage") or usage
            for choice in (found.get("choices") or [])[:1]:
                piece = (choice.get("delta") or {}).get("content") if self._is_chat else choice.get("text")
                if piece:
                    pieces.append((time.perf_counter(), piece))
        if not pieces:
            raise TriforceError("its answer has no text")
        return pieces, usage

    def _answer(self, task: Task, pieces: list[tuple[float, str]], usage: Mapping[str, Any], total_s: float) -> Answer:
        first, last = pieces[0], pieces[-1]
        tokens = self._tokens("".join(piece for _, piece in pieces), task.expected or [])
        later = (usage.get("completion_tokens") or len(tokens)) - len(self._encode(first[1]))
        seconds = last[0] - first[0]
        measured = {
            "ttft_s": self._whole_read(usage, len(task.ids), first[0]),
            "tokens_per_s": later / seconds if later > 0 and seconds > 0 else None,
            "total_s": total_s,
        }
        return Answer(measured, tokens, is_comparable=not self._is_chat)

    def _whole_read(self, usage: Mapping[str, Any], tokens: int, seconds: float) -> float | None:
        """Return the seconds to the first token, with those of what was read before; None where these are unknown."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if not self._reads.knows(cached):
            return None
        return self._reads.add(Read(cached, max(usage.get("prompt_tokens") or tokens, cached), seconds))

    def _tokens(self, text: str, expected: Sequence[int]) -> list[int]:
        """Return a text as tokens: as those expected as far as it is their text, then as it is encoded."""
        for end in range(len(expected), 0, -1):
            begins = self._tokenizer.decode(expected[:end])
            if text.startswith(begins):
                return [*expected[:end], *self._encode(text[len(begins) :])]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special_tokens=False)
