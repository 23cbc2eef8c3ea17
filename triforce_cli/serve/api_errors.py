"""Errors of the endpoint, as OpenAI's error object. Imports nothing heavy."""

import json
from collections.abc import Mapping
from typing import Any

from offload.errors import InternalError, TriforceError, UsageError

INVALID = "invalid_request_error"
_LINE_ENDS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}  # in texts; JSON escapes the others


class ApiError(Exception):
    """An error that a client gets: HTTP `status`, OpenAI's `type` and `code`, and the field `param` that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        type: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.type = status, message, code, param, type
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def unavailable(message: str) -> ApiError:
    """Return the error of a server that answers no more."""
    return ApiError(503, message, "unavailable", type="server_error")


def busy(message: str, seconds: int = 1) -> ApiError:
    """Return the error of a server that has no room now, and may have some after so many seconds."""
    return ApiError(503, message, "busy", None, "overloaded", {"retry-after": str(seconds)})


def api_error(error: Exception) -> ApiError:
    """Return what a client is told of an error: the message of one of ours, nothing of any other."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(400, error.message)
    if isinstance(error, TriforceError) and not isinstance(error, InternalError):
        return ApiError(500, error.message, type="server_error")
    return ApiError(500, "an internal error; the server's log has more", type="server_error")


def sound(text: str, where: str) -> str:
    """Return the text. Raises ApiError for half a surrogate pair, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{where} has half a surrogate pair, which is no character", param=where) from None
    return text


def event_text(value: Mapping[str, Any]) -> str:
    """Return a server-sent event with an object of the API, such as a chunk or an error.

    Many clients, those that use httpx' or requests' lines among them, end a line at what Unicode ends one at.
    """
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':')).translate(_LINE_ENDS)}\n\n"
