"""An OpenAI endpoint that answers, such as `triforce serve`, llama.cpp's server or vLLM's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from offload.errors import TriforceError
from offload.evaluation.tasks.task import Item

from .request import CHATTY

_PATIENCE = 3600.0  # seconds until an answer is complete
_KEY = "OPENAI_API_KEY"


@dataclass(slots=True)
class Endpoint:
    """An endpoint by its URL, such as http://127.0.0.1:8000/v1; behind # the model, if not its first one.

    It continues prompts, and where it only chats it is asked.
    """

    name: str
    is_chat: bool = False
    _model: str = field(default="", init=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Return what its answers depend on, as far as can be told from here."""
        return {"url": self.name, "model": self._find_model(), "is_chat": self.is_chat}

    @contextmanager
    def answering(self) -> Iterator[Callable[[Item], str]]:
        """Give what answers an item. That raises TriforceError."""
        yield self._answer

    def _find_model(self) -> str:
        if not self._model:
            self._model = self.name.partition("#")[2] or self._ask("models", "data", 0, "id")
        return self._model

    def _answer(self, item: Item) -> str:
        body = {"model": self._find_model(), "max_tokens": item.new_tokens, "temperature": 0, "seed": 0}
        if not self.is_chat:
            try:
                return self._ask("completions", "choices", 0, "text", body=body | {"prompt": item.prompt})
            except _NotThere:
                self.is_chat = True
        message = {"role": "user", "content": f"{item.text}\n\n{item.question}"}
        body |= {"messages": [message], "max_tokens": item.new_tokens + CHATTY}
        return self._ask("chat/completions", "choices", 0, "message", "content", body=body)

    def _ask(self, path: str, *keys: str | int, body: dict[str, Any] | None = None) -> str:
        """Return the text at `keys` of the JSON that a path answers; "" for null. Raises TriforceError."""
        url = f"{self.name.partition('#')[0].rstrip('/')}/{path}"
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {os.environ[_KEY]}"} if os.environ.get(_KEY) else {}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(url, data, headers), timeout=_PATIENCE) as answer:
                found = json.load(answer)
            for key in keys:
                found = found[key]
        except HTTPError as error:
            reason = f"{url}: {error.code} {error.read(500).decode(errors='replace')}"
            kind = _NotThere if error.code in (404, 405) else TriforceError
            raise kind(reason, "give the URL up to /v1, and --context that the server can take") from error
        except (URLError, HTTPException, OSError, ValueError) as error:
            raise TriforceError(f"{url}: {error}", "is it an OpenAI endpoint, and does it run?") from error
        except (LookupError, TypeError) as error:
            raise TriforceError(f"{url}: its JSON has no {keys[-1]}", "is it an OpenAI endpoint?") from error
        return "" if found is None else str(found)  # a chat that ended while it thought has no content


class _NotThere(TriforceError):
    """The endpoint has no such path."""
