"""Constraints over small vocabularies, whose masks can be found by brute force."""

from offload.constraints.grammar import compile_grammar
from offload.constraints.masks import TokenMasks
from offload.constraints.matcher import GrammarMatcher

BYTES = [bytes([each]) for each in range(256)]


def lltokenizer(tokens, encode=None, eos=None, special=()):
    """Return a vocabulary of llguidance; without `encode`, its own encoding is a token for each byte.

    `eos` is the last token if None; the tokens `special` are no text, either.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    class Wrapped:
        bos_token_id, eos_token_id = None, len(tokens) - 1 if eos is None else eos

        def __call__(self, text):
            data = text if isinstance(text, bytes) else text.encode()  # by whether it took bytes of another vocabulary
            return [self.tokens.index(data[at : at + 1]) for at in range(len(data))] if encode is None else encode(text)

    Wrapped.tokens, Wrapped.special_token_ids = list(tokens), [Wrapped.eos_token_id, *special]
    return LLTokenizer(TokenizerWrapper(Wrapped()), eos_token=Wrapped.eos_token_id, slices=[])


def byte_matcher(kind, text):
    """Return the matcher of a constraint over single bytes, of which 256 ends."""
    return GrammarMatcher(compile_grammar(kind, text, lltokenizer([*BYTES, b"<end>"])))


def masks(matcher, vocab, ends=None):
    return TokenMasks(matcher, [vocab - 1] if ends is None else ends, vocab)


def accepts(matcher, text):
    """Return whether an answer may be this text, as bytes."""
    found = all(matcher.consume(byte) for byte in text) and bool(matcher.allowed()[256])
    return found
