"""Errors of the endpoint, as OpenAI's error object. Imports nothing heavy."""

from typing import Any

from offload.errors import InternalError, TriforceError, UsageError


class ApiError(Exception):
    """An error that a client gets: HTTP `status`, OpenAI's `type` and `code`, and the field `param` that is wrong."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, **headers: str
    ) -> None:
        """`headers` of the response have _ in place of -."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 429: "rate_limit_error"}
        kind = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """Return what a client is told of an error: the message of one of ours, nothing of any other."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(400, f"{error.message}; {error.hint}" if error.hint else error.message)
    if isinstance(error, TriforceError) and not isinstance(error, InternalError):
        return ApiError(500, error.message)
    return ApiError(500, "an internal error; the server's log has more")
