"""`generate --server`: sends the request to a running `triforce serve`, and renders the events of its answer.

The protocol is OpenAI's, with the lines that tell how much of a prompt is read. Imports no torch: a shell's command
starts at once, and the model is warm.
"""

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import typer

from offload.errors import SettingsError, TriforceError, UsageError
from offload.events import Event, Finished, Prefilled, Text, Thought, Tokens
from offload.metrics import Meter
from offload.settings.constraint import JSON_SCHEMA
from offload.settings.parse import DEFAULTS

from ..options.declarations import AUTO
from ..options.settings import given_options
from ..output.progress import RunFacts
from ..output.renderers import Renderer
from ..signals import DONE

_FIELDS = {"max_new_tokens": "max_tokens"}  # names of settings in the API that differ from ours
_SENT = {"model", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop"}
_SENT |= {"frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range"}
_SENT |= {"no_repeat_ngram", "method", "budget", "gamma1", "gamma2"}
_LOCAL = ("verify", "dry_run", "truncate", "extend_context", "quote")  # flags that only a local run can follow
_CONNECT_S = 10
_REASONS = {"stop": "eos"}


def run_remote(server: str, text: str, ctx: typer.Context, renderer: Renderer) -> int:
    """Generate from a prompt on a server, writing as it comes; return the exit code.

    Raises SettingsError for options that the server cannot take, UsageError for what it refuses, TriforceError where
    it fails or is not there, BrokenPipeError, KeyboardInterrupt.
    """
    body = request_body(text, ctx)
    meter = Meter(0)
    renderer.start(RunFacts(meter, body.get("max_tokens") or DEFAULTS["max_new_tokens"]))
    usage: dict[str, Any] = {}
    facts = {"seed": body.get("seed"), "method": body.get("method"), "settings": body}
    with closing(_Connection(server)) as connection, closing(connection.events(body, usage)) as events:
        try:
            for event in events:
                meter.prompt_tokens = max(meter.prompt_tokens, event.total if isinstance(event, Prefilled) else 0)
                meter.observe(event)
                renderer.event(event)
        except KeyboardInterrupt:
            renderer.interrupt(meter.summary("interrupted", model=usage.get("model"), **facts))
            raise
    summary = meter.summary(meter.finish_reason or "interrupted", model=usage.get("model"), **facts)
    counts = usage.get("prompt_tokens", 0), usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    renderer.finish(replace(summary, prompt_tokens=counts[0], prefilled_tokens=counts[0], cached_tokens=counts[1]))
    return DONE


def request_body(text: str, ctx: typer.Context) -> dict[str, Any]:
    """Return the body of a chat completion; of a completion with --raw. Raises SettingsError."""
    params, (values, origins) = ctx.params, given_options(ctx)
    constraint = values.pop("constraint", None)
    typed = [name for name in values if name not in _SENT and origins[name] == "flag"]
    typed += [name for name in _LOCAL if params.get(name)]
    typed += [constraint.kind] if constraint is not None and constraint.kind != JSON_SCHEMA else []
    if typed:
        name = typed[0].replace("_", "-")
        raise SettingsError(f"--{name} is not for a server, which has its model loaded", "leave it or --server out")
    wanted = {_FIELDS.get(name, name): value for name, value in values.items() if name in _SENT}
    if origins.get("model") != "flag":
        wanted.pop("model", None)  # another program's default; the server has its own
    body = wanted | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if constraint is not None:
        schema = {"name": "answer", "schema": json.loads(constraint.text)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if params["raw"]:
        return body | {"prompt": text}
    if params["think"] not in (None, AUTO):
        body["chat_template_kwargs"] = {"enable_thinking": params["think"] == "on"}
    system = [{"role": "system", "content": params["system"]}] if params["system"] else []
    return body | {"messages": [*system, {"role": "user", "content": text}]}


class _Connection:
    """A connection to a server. Closing it cancels the request."""

    def __init__(self, server: str) -> None:
        """`server`: a URL, or a host and a port. Raises SettingsError for another form."""
        parts = urlsplit(server if "://" in server else f"http://{server}")
        kinds = {"http": HTTPConnection, "https": HTTPSConnection}
        try:
            self._http = kinds[parts.scheme](parts.hostname or "", parts.port, timeout=_CONNECT_S)
        except (KeyError, ValueError):
            raise SettingsError(f"--server {server} is not a URL", "give one such as http://127.0.0.1:8000") from None
        self._path, self._server = parts.path.rstrip("/").removesuffix("/v1"), server

    def close(self) -> None:
        self._http.close()

    def events(self, body: Mapping[str, Any], usage: dict[str, Any]) -> Generator[Event, None, None]:
        """Yield the events of an answer; `usage` gets the tokens that the server counts. Raises as `run_remote`."""
        try:
            yield from self._parsed(self._posted(body), usage)
        except (OSError, HTTPException) as error:
            if isinstance(error, BrokenPipeError):
                error = ConnectionError("it has closed the connection")  # not the reader of stdout
            hint = "start one in another terminal, and wait until it listens: triforce serve"
            raise TriforceError(f"the server {self._server} does not answer: {error}", hint) from None

    def _posted(self, body: Mapping[str, Any]) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("TRIFORCE_API_KEY"):
            headers["Authorization"] = f"Bearer {key.strip()}"
        self._http.connect()
        self._http.sock.settimeout(None)  # a long prompt is read for minutes
        path = "completions" if "prompt" in body else "chat/completions"
        self._http.request("POST", f"{self._path}/v1/{path}", json.dumps(body).encode(), headers)
        response = self._http.getresponse()
        if response.status != 200:
            raise _refusal(response.status, response.read())
        return response

    def _parsed(self, response: HTTPResponse, usage: dict[str, Any]) -> Iterator[Event]:
        for line in response:
            name, _, content = line.decode().rstrip().partition(":")
            if not name and content.startswith(" prefill"):
                done, total = content.split()[-2:]
                yield Prefilled(int(done), int(total))
            if name == "data" and content.strip() == "[DONE]":
                return
            if name == "data":
                yield from _chunk_events(json.loads(content), usage)
        raise ConnectionError("it has ended the connection before the answer's end")


def _chunk_events(chunk: dict[str, Any], usage: dict[str, Any]) -> Iterator[Event]:
    """Yield the events of a chunk; tokens have no ids, and as many zeros stand for them. Raises TriforceError."""
    if "error" in chunk:
        raise TriforceError(f"the server: {chunk['error']['message']}")
    before = usage.get("completion_tokens", 0)
    usage |= {"model": chunk.get("model")} | (chunk.get("usage") or {})
    new = usage.get("completion_tokens", 0) - before
    if new:
        yield Tokens((0,) * new)
    for choice in chunk["choices"]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        if thought := delta.get("reasoning_content"):
            yield Thought(thought, new)
        if text := delta.get("content"):
            yield Text(text)
        if reason := choice.get("finish_reason"):
            yield Finished(_REASONS.get(reason, reason))


def _refusal(status: int, body: bytes) -> TriforceError:
    """Return the error that a response with a status other than 200 describes."""
    message, hint = f"status {status}", "without --server, it runs in this process"
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        message = error["message"]
        if error.get("code") == "context_length_exceeded":
            hint = "without --server, a question is answered from parts of the text"
    hint = "give its key in the environment: TRIFORCE_API_KEY" if status == 401 else hint
    return (UsageError if status < 500 else TriforceError)(f"the server: {message}", hint)
