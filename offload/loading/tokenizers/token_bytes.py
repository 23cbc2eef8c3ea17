"""The bytes that each token stands for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from .text_pieces import steps_of

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"  # in vocabularies of SentencePiece
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
# By the characters that byte-level BPE writes for bytes, as GPT-2: those that print, themselves; others from U+0100 on.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}


class TokenBytes:
    """Returns the bytes of tokens, which joined are the text in UTF-8.

    Of a special token, which no text shows, they are its name; so are those of vocabularies of another kind than
    byte-level BPE and SentencePiece.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        steps = [] if backend.decoder is None else steps_of(backend.decoder, "decoders")
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._has_spaces = any(_SPACE in json.dumps(step, ensure_ascii=False) for step in steps)
        added = backend.get_added_tokens_decoder().items()
        self._special = {token: each.content for token, each in added if each.special}

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that is not a token, of padded embeddings."""
        if token in self._special:
            return self._special[token].encode()
        piece = self._backend.id_to_token(token) or ""
        if self._is_byte_level:
            return bytes(_BYTES[each] for each in piece) if all(map(_BYTES.__contains__, piece)) else piece.encode()
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return (piece.replace(_SPACE, " ") if self._has_spaces else piece).encode()
