"""The texts of a request of the OpenAI API: the messages of a chat, the prompts of a completion."""

from __future__ import annotations

from typing import Any

from offload.loading.tokenizers.conversation import ASSISTANT, SYSTEM, USER, ChatMessage

from .api_errors import ApiError

MOST_MESSAGES = 4096  # each is searched for in what the template makes of all
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}

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
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise ApiError(400, f"{name} in {where} is not supported", "unsupported_field", where)
    return ChatMessage(_ROLES[role], _content(value.get("content"), where))


def _content(value: Any, where: str) -> str:
    """Return the text of a message: a text, or parts that are all texts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(map(_is_text_part, parts)):
        raise ApiError(400, f"the content of {where} is no text, and no list of text parts", param=where)
    return sound("".join(part["text"] for part in parts), where)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def sound(text: str, where: str) -> str:
    """Return the text. Raises ApiError for half a surrogate pair, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{where} has half a surrogate pair, which is no character", param=where) from None
    return text
