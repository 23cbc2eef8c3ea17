"""A model's vocabulary as llguidance reads it, and the masks of a constraint over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..settings.constraint import QUOTE, Constraint
from .grammar import compile_grammar
from .masks import TokenMasks
from .matcher import AfterThinking, GrammarMatcher
from .quotes import QuotableTokens, QuoteMatcher

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from ..loading.tokenizers.tokenizer import Tokenizer

_LONGEST = 200  # bytes of a token: llguidance takes no longer ones, and no answer needs them
_SENTINEL = "\x02"  # before a text that a tokenizer would put a space before
_COMPILED = 64  # constraints that are kept


class ConstraintVocabulary:
    """Makes the masks of constraints for one model. Reading a vocabulary of 150,000 tokens takes a second, once."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer` is called for a constraint only.

        `vocab` are the model's logits, of which a padded embedding has more than the tokenizer has tokens.
        """
        self._load, self._vocab, self._eos_ids = tokenizer, vocab, list(eos_ids)
        self._prototype = lru_cache(_COMPILED)(self._compiled)

    def masks(self, constraint: Constraint, prompt: Sequence[int]) -> TokenMasks:
        """Return the masks of an answer to a prompt. Raises SettingsError for a constraint that cannot be met."""
        matcher = self._prototype(constraint.kind, constraint.text).fork()
        thinking = self._tokenizer.thinking(prompt) if constraint.after_thinking else None
        if thinking is not None:
            matcher = AfterThinking(matcher, self._bytes, thinking)
        return TokenMasks(matcher, self._eos_ids, self._vocab)

    def check(self, constraint: Constraint) -> None:
        """Raise SettingsError for a constraint that cannot be met."""
        self._prototype(constraint.kind, constraint.text)

    def _compiled(self, kind: str, text: str) -> Any:
        if not self._eos_ids:
            hint = "name it in the model's generation_config.json, as eos_token_id"
            raise SettingsError("the model has no end-of-sequence token, which an answer of a given form needs", hint)
        if kind == QUOTE:
            return QuoteMatcher(text, self._quotable, self._eos_ids[0])
        return GrammarMatcher(compile_grammar(kind, text, self._lltokenizer))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load()

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each token of the logits; none of those that no text has."""
        count = min(max(self._tokenizer.vocabulary.values()) + 1, self._vocab)  # ids may have gaps
        found = [data if len(data) <= _LONGEST else b"" for data in map(self._tokenizer.token_bytes, range(count))]
        return found + [b""] * (self._vocab - count)

    @cached_property
    def _quotable(self) -> QuotableTokens:
        special = set(self._tokenizer.special_ids.values())
        return QuotableTokens([b"" if token in special else data for token, data in enumerate(self._bytes)])

    @cached_property
    def _lltokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapped = TokenizerWrapper(_Encoder(self._tokenizer, self._bytes, self._eos_ids[0]))
        return LLTokenizer(wrapped, n_vocab=self._vocab, eos_token=self._eos_ids[0], slices=LLTokenizer.json_slices())


class _Encoder:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos: int) -> None:
        self._tokenizer, self.tokens, self.eos_token_id = tokenizer, tokens, eos
        self.special_token_ids = list(tokenizer.special_ids.values())

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text within an answer. Those of one at a beginning may have a space before it."""
        ids = self._tokenizer.encode(text.decode(), False)
        if b"".join(self.tokens[each] for each in ids) == text:
            return ids
        before = self._tokenizer.encode(_SENTINEL, False)
        return self._tokenizer.encode(_SENTINEL + text.decode(), False)[len(before) :]
