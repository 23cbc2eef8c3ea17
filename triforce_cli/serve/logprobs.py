"""Log-probabilities of an answer's tokens in the forms of the OpenAI API: that of a chat, and that of a completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from offload.events import ScoredToken

LEAST = -9999.0  # for a probability of 0: JSON has no infinity
_NOT_TEXT = "bytes:"  # before the bytes of a token that is no text, in a completion

TokenBytes = Callable[[int], bytes]


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice: tokens with theirs, and the likeliest at their places."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token)
        return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(each.id, each.logprobs.logprob) | {"top_logprobs": [entry(*row) for row in each.logprobs.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice, as lists. The likeliest at a place have the token's own beside.

    Of tokens that are spelt alike, the likeliest one is there.
    """

    def spelt(token: int) -> str:
        return token_text(token_bytes(token), _NOT_TEXT)

    def likeliest(each: ScoredToken) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*each.logprobs.top, (each.id, each.logprobs.logprob)):
            found.setdefault(spelt(token), _finite(logprob))
        return found

    return {
        "text_offset": [each.offset for each in tokens],
        "token_logprobs": [_finite(each.logprobs.logprob) for each in tokens],
        "tokens": [spelt(each.id) for each in tokens],
        "top_logprobs": [likeliest(each) for each in tokens],
    }


def token_text(data: bytes, prefix: str = "") -> str:
    r"""Return a token as text; one that is only a part of a character as `\xe2\x82`, after the prefix."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
