"""Checks whether one model can draft for another, before either is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ..architecture.config import ModelShape
from ..config import Speculation
from ..errors import SettingsError
from ..levels import draft_chunk
from .tokenizer import Tokenizer


def check_draft(target: Tokenizer, draft: Tokenizer, shape: ModelShape, settings: Speculation) -> None:
    """Raise SettingsError if a draft model cannot draft: its vocabulary differs, or its context is too short."""
    theirs, ours = draft.vocabulary, target.vocabulary
    if theirs != ours:
        wrong = min((n for token, n in ours.items() if theirs.get(token) != n), default=None)
        wrong = wrong if wrong is not None else min(n for token, n in theirs.items() if ours.get(token) != n)
        names = [{n: token for token, n in words.items()}.get(wrong) for words in (ours, theirs)]
        raise SettingsError(
            f"the draft model's vocabulary differs: {len(theirs):,} tokens where the target has {len(ours):,}; "
            f"id {wrong} is {names[1]!r} where the target has {names[0]!r}",
            "draft with a smaller model of the same family, or use --draft lookup",
        )
    needed = settings.sink + settings.window + draft_chunk(settings)
    if needed > shape.context:
        raise SettingsError(
            f"the draft model's context of {shape.context:,} tokens is shorter than its cache: --sink, --window and "
            f"what it reads at once are {needed:,}",
            "use a smaller --window or --sink",
        )


def tokens_containing(vocabulary: Mapping[str, int], texts: Collection[str]) -> frozenset[int]:
    """Return the ids of the tokens whose text contains one of some ASCII texts.

    A vocabulary spells control characters and spaces as byte-level BPE (U+0100 + byte) or as SentencePiece (<0x0A>)
    does, or as they are.
    """
    spellings = {*texts}
    for text in texts:
        spellings.add("".join(chr(0x100 + ord(each)) if ord(each) <= 0x20 else each for each in text))
        spellings.add("".join(f"<0x{ord(each):02X}>" for each in text))
    found = re.compile("|".join(map(re.escape, sorted(spellings)))).search
    return frozenset(token for text, token in vocabulary.items() if found(text))
