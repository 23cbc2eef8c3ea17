"""Bodies of requests: read together in bounded memory, each in bounded time and of bounded JSON; and their texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from starlette.requests import Request

from offload.loading.tokenizers.chat_template import ASSISTANT, SYSTEM, USER, ChatMessage

from .api_errors import ApiError, busy, sound
from .tools import message_fields

SECONDS = 60  # for a whole body
_TIMES, _TOGETHER = 4, 1 << 26  # all bodies together: as many of the longest, and no fewer bytes than that
_LEAST = 1 << 16  # bytes that any body counts: the buffer of its connection


JSON = "application/json"


class Bodies:
    """Holds a place in memory for each body that is being read or whose prompt is being encoded."""

    def __init__(self, most: int) -> None:
        """`most` is the bytes of the longest body."""
        self.most, self.free = most, max(_TIMES * most, _TOGETHER)

    @contextmanager
    def place(self, request: Request, wanted: str = JSON) -> Iterator[Body]:
        """Yield the body, in a place of its Content-Length. Raises ApiError if it may not be read, or not now.

        The `wanted` Content-Type must be one that a page of another site cannot send without asking first (CORS).
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != wanted:
            how = f"the Content-Type must be {wanted}: curl needs -H 'Content-Type: {wanted}'"
            raise ApiError(415, how, "unsupported_media_type")
        length = request.headers.get("content-length", "")
        body = Body(self, request.stream())
        try:
            body.grow(int(length) if length.isdecimal() else 0)
            yield body
        finally:
            self.free += body.held


class Body:
    """The body of one request, and the bytes that are held for it."""

    def __init__(self, bodies: Bodies, pieces: AsyncIterator[bytes]) -> None:
        self._bodies, self._pieces, self.held = bodies, pieces, 0

    def grow(self, size: int) -> None:
        """Hold as many bytes. Raises ApiError if a body may never have them, or others hold them now."""
        if size > self._bodies.most:
            raise ApiError(413, f"the request has more than {self._bodies.most:,} bytes", "request_too_large")
        more = max(size - self.held, _LEAST - self.held, 0)
        if more > self._bodies.free:
            raise busy("too many requests are being read")
        self._bodies.free -= more
        self.held += more

    async def read(self) -> bytearray:
        """Return the body. Raises ApiError before reading more than it may have, or if it takes too long."""
        data, end = bytearray(), asyncio.get_running_loop().time() + SECONDS
        while (piece := await self._next(end)) is not None:
            self.grow(len(data) + len(piece))
            data += piece
        return data

    async def _next(self, end: float) -> bytes | None:
        """Return the next piece, None after the last one."""
        left = end - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(anext(self._pieces, None), max(left, 0))
        except asyncio.TimeoutError:
            message, close = f"the request has not come within {SECONDS:g} seconds", {"connection": "close"}
            raise ApiError(408, message, "request_timeout", headers=close) from None


MOST_PARTS = 1 << 16  # lists, objects and their fields: the messages of a chat have some 30,000 at most
_PIECE = 1 << 20  # bytes that are counted at a time
_QUOTE, _COMMA, _COLON, _LIST, _OBJECT = b'",:[{'


def check_json(data: bytes | bytearray, most_items: int) -> None:
    """Raise ApiError for more than `most_items` commas, or MOST_PARTS lists, objects and fields, outside of texts.

    What is no valid JSON may be counted in any way.
    """
    parts = items = 0
    is_text, start = False, 0
    while start < len(data):
        piece = data[start : start + _PIECE]
        escapes = len(piece) - len(piece.rstrip(b"\\"))
        if escapes % 2:  # what the last one escapes belongs to it
            piece = data[start : start + _PIECE + 1]
        start += len(piece)
        codes = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        texts = np.logical_xor.accumulate(codes == _QUOTE) ^ is_text  # quotes that open a text are part of it
        is_text = bool(texts[-1]) if len(texts) else is_text
        items += int(np.count_nonzero((codes == _COMMA) & ~texts))
        parts += int(np.count_nonzero(((codes == _LIST) | (codes == _OBJECT) | (codes == _COLON)) & ~texts))
        if parts > MOST_PARTS or items > most_items:
            raise ApiError(413, "the JSON of the request has too many values", "request_too_large")


MOST_MESSAGES = 4096  # each is searched for in what the template makes of all
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": "tool"}

Prompt = str | list[int]


def prompts_of(value: Any) -> list[Prompt]:
    """Return the prompts of a completion, each a text or token ids. Raises ApiError."""
    several = isinstance(value, list) and bool(value) and not _is_ids(value)
    found = [sound(each, "prompt") if isinstance(each, str) else each for each in (value if several else [value])]
    if not all((isinstance(each, str) and each) or _is_ids(each) for each in found):
        raise ApiError(400, "prompt is no text, no list of texts, and no list of token ids", param="prompt")
    return found


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def messages_of(value: Any) -> list[ChatMessage]:
    """Return the messages of a chat. Raises ApiError."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_MESSAGES:
        raise ApiError(400, f"messages is no list of 1 to {MOST_MESSAGES:,} messages", param="messages")
    return [_message(each, f"messages[{number}]") for number, each in enumerate(value)]


def _message(value: Any, where: str) -> ChatMessage:
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{where} is no object with a role of {', '.join(_ROLES)}", param=where)
    for name in ("function_call", "audio"):
        if value.get(name):
            raise ApiError(400, f"{name} in {where} is not supported", "unsupported_field", where)
    more = message_fields(value, where)
    sound(json.dumps(more, ensure_ascii=False), where)
    content = "" if value.get("content") is None and more else value.get("content")
    return ChatMessage(_ROLES[role], _content(content, where), more=more)


def _content(value: Any, where: str) -> str:
    """Return the text of a message: a text, or parts that are all texts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(map(_is_text_part, parts)):
        raise ApiError(400, f"the content of {where} is no text, and no list of text parts", param=where)
    return sound("".join(part["text"] for part in parts), where)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
