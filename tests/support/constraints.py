"""Constraints over small vocabularies, whose masks can be found by brute force."""

from offload.constraints.grammar import compile_grammar
from offload.constraints.masks import TokenMasks
from offload.constraints.matcher import GrammarMatcher

BYTES = [bytes([each]) for each in range(256)]


def lltokenizer(tokens, encode=None, eos=None):
    """Return a vocabulary of llguidance; without `encode`, its own encoding is a token for each byte."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Wrapped:
        bos_token_id, special_token_ids = None, [len(tokens) - 1]
        eos_token_id = len(tokens) - 1

        def __call__(self, text):
            return [self.tokens.index(text[at : at + 1]) for at in range(len(text))] if encode is None else encode(text)

    Wrapped.tokens = list(tokens)
    return LLTokenizer(TokenizerWrapper(Wrapped()), eos_token=len(tokens) - 1, slices=[])


def byte_matcher(kind, text):
    """Return the matcher of a constraint over single bytes, of which 256 ends."""
    return GrammarMatcher(compile_grammar(kind, text, lltokenizer([*BYTES, b"<end>"])))


def masks(matcher, vocab, ends=None):
    return TokenMasks(matcher, [vocab - 1] if ends is None else ends, vocab)


def accepts(matcher, text):
    """Return whether an answer may be this text, as bytes."""
    found = all(matcher.consume(byte) for byte in text) and bool(matcher.allowed()[256])
    return found
