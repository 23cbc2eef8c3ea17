"""A client of an OpenAI endpoint, such as `triforce serve`, llama.cpp's server or vLLM's."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from offload.errors import TriforceError

_PATIENCE = 3600.0  # seconds until an answer is complete
_KEY = "OPENAI_API_KEY"


class NotThere(TriforceError):
    """The endpoint has no such path."""


class Refused(TriforceError):
    """The endpoint takes no such request."""


class OpenAIClient:
    """Asks an endpoint by its URL, such as http://127.0.0.1:8000/v1; behind # the model, if not its first one.

    All that asks raises TriforceError.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._model = ""

    @property
    def model(self) -> str:
        """Return the name of the model, asking for it once."""
        if not self._model:
            self._model = self.name.partition("#")[2] or self.ask("models", "data", 0, "id")
        return self._model

    def ask(self, path: str, *keys: str | int, body: dict[str, Any] | None = None) -> str:
        """Return the text at `keys` of the JSON that a path answers; "" for null."""
        with self._answer(path, body) as answer:
            found = json.load(answer)
        try:
            for key in keys:
                found = found[key]
        except (LookupError, TypeError) as error:
            message = f"{self._url(path)}: its JSON has no {keys[-1]}"
            raise TriforceError(message, "is it an OpenAI endpoint?") from error
        return "" if found is None else str(found)  # a chat that ended while it thought has no content

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of a streamed answer as they arrive."""
        with self._answer(path, body | {"stream": True}) as answer:
            for line in answer:
                data = line.partition(b"data:")[2].strip()
                if data and data != b"[DONE]":
                    found = json.loads(data)
                    if not isinstance(found, dict) or found.get("error"):
                        raise TriforceError(f"{self._url(path)}: {data[:500].decode(errors='replace')}")
                    yield found

    def _url(self, path: str) -> str:
        return f"{self.name.partition('#')[0].rstrip('/')}/{path}"

    @contextmanager
    def _answer(self, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        url = self._url(path)
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {os.environ[_KEY]}"} if os.environ.get(_KEY) else {}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(url, data, headers), timeout=_PATIENCE) as answer:
                yield answer
        except HTTPError as error:
            reason = f"{url}: {error.code} {error.read(500).decode(errors='replace')}"
            kind = NotThere if error.code in (404, 405) else Refused if error.code in (400, 422) else TriforceError
            raise kind(reason, "give the URL up to /v1, and --context that the server can take") from error
        except (URLError, HTTPException, OSError, ValueError) as error:
            raise TriforceError(f"{url}: {error}", "is it an OpenAI endpoint, and does it run?") from error


def is_endpoint(name: str) -> bool:
    """Return whether a name is the URL of an endpoint."""
    return name.startswith(("http://", "https://"))
