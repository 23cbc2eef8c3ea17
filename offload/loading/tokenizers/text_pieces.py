"""Cuts a long text where a tokenizer's tokens end whatever follows, so that it can be encoded piece by piece.

A cut lies between a letter and a whitespace character. The patterns of the byte-level tokenizers listed here match
letters only up to whitespace, from left to right, so a match ends at each cut. BPE merges nothing across matches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PIECE = 2**16  # characters, at least: encoded in a fraction of a second, while no signal is answered
_CUT = re.compile(r"[^\W\d_](?=[ \t\r\n])")
_PATTERNS = (QWEN_PATTERN, LLAMA3_PATTERN, GPT2_PATTERN)


def can_cut(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the token ids of a text are those of its pieces, one after the other."""
    from tokenizers import models, normalizers

    is_bpe = isinstance(backend.model, models.BPE) and not backend.model.dropout
    if not is_bpe or backend.pre_tokenizer is None or not isinstance(backend.normalizer, (normalizers.NFC, type(None))):
        return False
    steps = steps_of(backend.pre_tokenizer, "pretokenizers")
    splits = any(step["type"] == "Split" or step.get("use_regex") for step in steps)
    return (
        splits and all(map(_keeps_cuts, steps)) and not any(map(_crosses, backend.get_added_tokens_decoder().values()))
    )


def steps_of(part: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's part, which is one or a sequence of them, called `name`."""
    state = json.loads(part.__getstate__())
    return state[name] if state["type"] == "Sequence" else [state]


def _keeps_cuts(step: dict[str, Any]) -> bool:
    """Return whether a step of the pre-tokenizer gives the same for pieces as for the whole text."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    if step["type"] == "Split":
        return step["behavior"] == "Isolated" and not step["invert"] and step["pattern"].get("Regex") in _PATTERNS
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
