"""Cuts a long text where a tokenizer's tokens end whatever follows, so that it can be encoded piece by piece.

A cut lies between a letter and a whitespace character. The patterns of the byte-level tokenizers listed here match
letters only up to whitespace, from left to right, so a match ends at each cut. BPE merges nothing across matches.

Also the bytes that a token stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .tokenizer_classes import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN

if TYPE_CHECKING:
    import tokenizers


PIECE = 2**16  # characters, at least: encoded in a fraction of a second, while no signal is answered
_CUT = re.compile(r"[^\W\d_](?=[ \t\r\n])")
_PATTERNS = (QWEN_PATTERN, LLAMA3_PATTERN, GPT2_PATTERN)


def can_cut(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the token ids of a text are those of its pieces, one after the other."""
    from tokenizers import models, normalizers

    model, normalizer = backend.model, backend.normalizer
    if not isinstance(model, models.BPE) or model.dropout or backend.pre_tokenizer is None:
        return False
    if not (normalizer is None or isinstance(normalizer, normalizers.NFC)):
        return False
    steps = json.loads(backend.pre_tokenizer.__getstate__())
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    if not all(map(_keeps_cuts, steps)) or not any(map(_cuts, steps)):
        return False
    return not any(map(_crosses, backend.get_added_tokens_decoder().values()))


def _cuts(step: dict[str, Any]) -> bool:
    """Return whether a step of the pre-tokenizer splits the text at every cut."""
    return step["type"] == "Split" or (step["type"] == "ByteLevel" and step.get("use_regex", True))


def _keeps_cuts(step: dict[str, Any]) -> bool:
    """Return whether a step gives the same for pieces as for the whole text."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    if step["type"] == "Split":
        isolated = step["behavior"] == "Isolated" and not step["invert"]
        return isolated and step["pattern"].get("Regex") in _PATTERNS
    return step["type"] == "Digits"


def _crosses(token: Any) -> bool:
    """Return whether an added token could lie across a cut, or be found on one side of it only."""
    content = token.content
    takes_space = token.rstrip and content[-1:].isalpha()
    return bool(_CUT.search(content)) or takes_space or (token.single_word and content[:1].isspace())


def pieces(text: str, size: int) -> Iterator[str]:
    """Yield pieces of at least `size` characters that make up the text, the last one of any size."""
    start = 0
    while start < len(text):
        found = _CUT.search(text, start + size)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"  # in vocabularies of SentencePiece


def _byte_of_character() -> dict[str, int]:
    """Return the bytes by the characters that byte-level BPE writes for them, as GPT-2: those that print, themselves.

    The others are the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenBytes:
    """Returns the bytes of tokens, which joined are the text in UTF-8.

    Of a special token, which no text shows, they are its name; so are those of vocabularies of another kind than
    byte-level BPE and SentencePiece.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        steps = _decoding_steps(backend)
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._has_spaces = any(_SPACE in json.dumps(step, ensure_ascii=False) for step in steps)
        added = backend.get_added_tokens_decoder().items()
        self._special = {token: each.content for token, each in added if each.special}

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that is no token, of padded embeddings."""
        if token in self._special:
            return self._special[token].encode()
        piece = self._backend.id_to_token(token) or ""
        if self._is_byte_level:
            return bytes(_BYTES[each] for each in piece) if all(map(_BYTES.__contains__, piece)) else piece.encode()
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return (piece.replace(_SPACE, " ") if self._has_spaces else piece).encode()


def _decoding_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]
