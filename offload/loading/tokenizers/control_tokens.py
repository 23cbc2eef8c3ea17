"""Keeps control tokens that a message spells out apart from those of the chat template, which act on the model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_SALT = secrets.token_hex(8)  # no document knows it
_ESCAPED = re.compile(rf"\[{_SALT}-(\d+)\]")
_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL).fullmatch  # an added token that is not text


class ControlTokens:
    """Escapes the control tokens in messages before a template is rendered, and encodes the rendered text.

    Its backend has the model and the rules of the tokenizer's, but control tokens have secret names in it. So a prompt
    is encoded as one text, in which spelt control tokens are text. Added tokens such as <think> act on the model like
    special ones, but many tokenizers do not call them special. Others, such as runs of blanks, stay tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, splits_special_tokens: bool) -> None:
        self._original, self._added = backend, backend.get_added_tokens_decoder()
        self._control = {
            token.content: number
            for number, token in self._added.items()
            if (token.special and not splits_special_tokens) or _MARKUP(token.content)
        }
        longest_first = map(re.escape, sorted(self._control, key=len, reverse=True))
        self._spelt = re.compile("|".join(longest_first) or "(?!)")
        self._either = re.compile(f"{_ESCAPED.pattern}|{self._spelt.pattern}")

    def escape(self, value: Any, kept: Collection[str] = ()) -> Any:
        """Return a value of JSON with the control tokens in its texts escaped, but for those that are `kept`."""
        if isinstance(value, str):
            return self._spelt.sub(lambda at: at[0] if at[0] in kept else f"[{_SALT}-{self._control[at[0]]}]", value)
        if isinstance(value, Mapping):
            return {self.escape(name, kept): self.escape(each, kept) for name, each in value.items()}
        return [self.escape(each, kept) for each in value] if isinstance(value, (list, tuple)) else value

    @staticmethod
    def has_escaped(text: str) -> bool:
        return _ESCAPED.search(text) is not None

    def named(self, text: str) -> str:
        """Return a rendered text for the `backend`: escaped tokens as they are spelt, others by their secret names."""
        return self._either.sub(
            lambda at: self._added[int(at[1])].content if at[1] else _secret(self._control[at[0]]), text
        )

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The backend that takes control tokens for text, but for their secret names."""
        from tokenizers import AddedToken

        backend = type(self._original)(self._original.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self._original, part) is not None:
                setattr(backend, part, getattr(self._original, part))
        for name, number in self._names.items():
            token = self._added[number]
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(name, special=token.special, **flags)])
        return backend

    @cached_property
    def _names(self) -> dict[str, int]:
        """The ids of added tokens by their names in the backend."""
        return {
            _secret(number) if token.content in self._control else token.content: number
            for number, token in self._added.items()
        }

    @cached_property
    def ids(self) -> dict[int, int]:
        """The ids of added tokens by those that they have in the `backend`."""
        found = {self.backend.token_to_id(name): number for name, number in self._names.items()}
        return {own: number for own, number in found.items() if own is not None}


def _secret(number: int) -> str:
    return f"<{_SALT}-{number}>"
