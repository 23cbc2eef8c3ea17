"""An OpenAI endpoint that `bench --ladder --peers` measures. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from offload.errors import TriforceError

from ..run.openai_client import NotThere, OpenAIClient, Refused
from .peer import Answer, Task
from .read_times import Read, ReadTimes

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel

_EXTRAS = {"ignore_eos": True, "cache_prompt": False}  # fields that some endpoints have


class EndpointPeer:
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
        body = {"model": self._client.model, "max_tokens": task.new_tokens, "seed": task.seed}
        optional = {name: task.chosen[name] for name in ("top_k", "min_p") if task.chosen[name]}  # not all know these
        body |= {"temperature": task.sampling.temperature, "top_p": task.sampling.top_p} | optional
        body |= {"stream_options": {"include_usage": True}}
        text = self._tokenizer.decode(task.ids)
        if not self._is_chat:
            # Cut and joined, a text may be encoded as other tokens.
            is_same = self._tokenizer.encode(text, special_tokens=True) == list(task.ids)
            try:
                return self._first(task, [text] if is_same else [list(task.ids), text], body, is_same)
            except NotThere:
                self._is_chat = True
        return self._first(task, [text], body, False)

    def _first(self, task: Task, prompts: Sequence[str | list[int]], body: dict[str, Any], is_same: bool) -> Answer:
        """Return the answer to the first form of a request that the endpoint takes."""
        refused = None
        for prompt, extras in product(prompts, (self._extras, {}) if self._extras else ({},)):
            began = time.perf_counter()
            try:
                pieces, usage = self._read(prompt, body | extras)
            except Refused as error:
                refused = refused or error
                continue
            total_s, self._extras = time.perf_counter() - began, extras
            is_same = is_same or isinstance(prompt, list)
            is_same = is_same and usage.get("prompt_tokens", len(task.ids)) == len(task.ids)
            return self._answer(task, [(at - began, piece) for at, piece in pieces], usage, total_s, is_same)
        raise refused or TriforceError("it takes no request")

    def close(self) -> None:
        """Do nothing: every request has its own connection."""

    def _read(self, prompt: str | list[int], body: dict[str, Any]) -> tuple[list[tuple[float, str]], Mapping[str, Any]]:
        """Return the pieces of an answer and when they arrived, and what the endpoint says of its tokens."""
        pieces: list[tuple[float, str]] = []
        usage: Mapping[str, Any] = {}
        path = "chat/completions" if self._is_chat else "completions"
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._is_chat else {"prompt": prompt}
        for found in self._client.stream(path, body | asked):
            usage = found.get("usage") or usage
            for choice in (found.get("choices") or [])[:1]:
                piece = (choice.get("delta") or {}).get("content") if self._is_chat else choice.get("text")
                if piece:
                    pieces.append((time.perf_counter(), piece))
        if not pieces:
            raise TriforceError("its answer has no text")
        return pieces, usage

    def _answer(
        self, task: Task, pieces: list[tuple[float, str]], usage: Mapping[str, Any], total_s: float, is_same: bool
    ) -> Answer:
        first, last = pieces[0], pieces[-1]
        tokens = self._tokens("".join(piece for _, piece in pieces), task.expected or [])
        later = (usage.get("completion_tokens") or len(tokens)) - len(self._encode(first[1]))
        seconds = last[0] - first[0]
        measured = {
            "ttft_s": self._whole_read(usage, len(task.ids), first[0]),
            "tokens_per_s": later / seconds if later > 0 and seconds > 0 else None,
            "total_s": total_s,
        }
        return Answer(measured, tokens, is_same)

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
