"""An OpenAI endpoint that answers, such as `triforce serve`, llama.cpp's server or vLLM's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from offload.evaluation.tasks.task import Item

from ..run.openai_client import NotThere, OpenAIClient
from .request import CHATTY


@dataclass(slots=True)
class Endpoint:
    """An endpoint by its URL. It continues prompts, and where it only chats it is asked."""

    name: str
    is_chat: bool = False
    _client: OpenAIClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = OpenAIClient(self.name)

    @property
    def facts(self) -> dict[str, Any]:
        """Return what its answers depend on, as far as can be told from here."""
        return {"url": self.name, "model": self._client.model, "is_chat": self.is_chat}

    @contextmanager
    def answering(self) -> Iterator[Callable[[Item], str]]:
        """Give what answers an item. That raises TriforceError."""
        yield self._answer

    def _answer(self, item: Item) -> str:
        body = {"model": self._client.model, "max_tokens": item.new_tokens, "temperature": 0, "seed": 0}
        if not self.is_chat:
            try:
                return self._client.ask("completions", "choices", 0, "text", body=body | {"prompt": item.prompt})
            except NotThere:
                self.is_chat = True
        message = {"role": "user", "content": f"{item.text}\n\n{item.question}"}
        body |= {"messages": [message], "max_tokens": item.new_tokens + CHATTY}
        return self._client.ask("chat/completions", "choices", 0, "message", "content", body=body)
