"""Checks whether one model can draft for another, before either is loaded."""

import re
from collections.abc import Collection, Mapping

from ...architecture.config import ModelShape
from ...errors import SettingsError
from ...settings.config import Speculation
from ...settings.method_sizes import draft_chunk
from ...short_repr import short_repr
from .tokenizer import Tokenizer

_MOST_DIFFERENT = 0.01  # of the ids of both: special tokens that are named anew, not another tokenizer
_LEAST_SHARED = 0.5  # of the target's tokens: with fewer, hardly a draft would be accepted


def check_draft(
    target: Tokenizer, draft: Tokenizer, shape: ModelShape, settings: Speculation, sibling: str | None = None
) -> list[int]:
    """Return the ids that a draft model must not propose: those that are not the same token in both vocabularies.

    Ids that neither vocabulary has, of padded embeddings, are not among them.

    Args:
        shape: the draft model's.
        sibling: the name of a model that drafts for the target, for the hint; None if none is known.

    Raises:
        SettingsError: if they are more than a few, or the draft model's context is too short for its cache.
    """
    ours, theirs = ({n: token for token, n in each.vocabulary.items()} for each in (target, draft))
    different = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    common = ours.keys() & theirs.keys()
    same = len(common) - sum(n in common for n in different)
    if same < (1 - _MOST_DIFFERENT) * len(common) or same < _LEAST_SHARED * len(ours):
        first = different[0]
        one, other = (short_repr(each[first]) if first in each else "no token" for each in (theirs, ours))
        smaller = "draft with a smaller model of the same family"
        raise SettingsError(
            f"the draft model's vocabulary is another one: {len(theirs):,} tokens where the target has {len(ours):,}, "
            f"and {len(different):,} ids are not the same; the first is {first}, {one} where the target has {other}",
            f"{smaller if sibling is None else f'use --draft {sibling}'}, or use --draft lookup",
        )
    needed = settings.sink + settings.window + draft_chunk(settings)
    if needed > shape.context:
        raise SettingsError(
            f"the draft model's context of {shape.context:,} tokens is shorter than its cache: sink, window and "
            f"what it reads at once are {needed:,}",
            "use a smaller window, such as --set window=64",
        )
    return different


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
