"""Tokens with log-probabilities come with their text: none lost, none early, none of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from offload.events import Finished, Logprobs, Text, Tokens
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.thinking import Thinking
from offload.loading.tokenizers.token_bytes import TokenBytes
from offload.loading.tokenizers.tokenizer import Tokenizer
from tests.support.models import make_tokenizer

TOKENIZER = Tokenizer.from_transformers(make_tokenizer())


def events_of(text, run):
    """The engine's events for a text, `run` tokens at a time: the logprob of token number n is -n."""
    ids = TOKENIZER.encode(text, special_tokens=False)
    for start in range(0, len(ids), run):
        own = tuple(ids[start : start + run])
        if (yield Tokens(own, tuple(Logprobs(-float(start + at), ()) for at in range(len(own))))) is not None:
            yield Finished("stop")
            return
    yield Finished("length")


def streamed(text, stops=(), run=1, thinking=None):
    """Return the Text events, and what of the text the tokens' bytes are."""
    layer = TextLayer(TOKENIZER.decode, stops, thinking)
    texts = [each for each in stream_text(events_of(text, run), layer) if isinstance(each, Text)]
    return texts, b"".join(TOKENIZER.token_bytes(token.id) for each in texts for token in each.tokens).decode()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab the é€😀漢"), max_size=30), st.integers(1, 9), st.sampled_from(["b t", "é€", "the"]))
def test_tokens_come_with_their_text_and_begin_where_they_say(text, run, stop):
    texts, spelt = streamed(text, [stop], run)
    answer = text.partition(stop)[0]
    assert "".join(each.text for each in texts) == answer
    assert spelt.startswith(answer) and text.startswith(spelt)
    scored = [token for each in texts for token in each.tokens]
    assert [-token.logprobs.logprob for token in scored] == list(range(len(scored)))
    bytes_before = 0
    for token in scored:
        # Where a character takes several tokens, all begin where it does.
        assert token.offset == len(text.encode()[:bytes_before].decode(errors="ignore"))
        bytes_before += len(TOKENIZER.token_bytes(token.id))
    assert all(token.offset < len(answer) for token in scored)
    emitted = 0
    for each in texts:
        emitted += len(each.text)
        assert all(token.offset < emitted for token in each.tokens)


@pytest.mark.parametrize("run", [1, 4, 100])
def test_what_is_thought_has_none(run):
    thought = "<think>\nLet me sée.\n</think>"
    texts, spelt = streamed(f"{thought}\n\nIt is 4.", run=run, thinking=Thinking())
    assert "".join(each.text for each in texts) == "It is 4." and spelt.lstrip() == "It is 4."
    open_, spelt = streamed(thought.removeprefix("<think>") + "4", run=run, thinking=Thinking(is_open=True))
    assert spelt == "4" and len(open_) == 1


def test_bytes_of_byte_level_tokens():
    assert [TOKENIZER.token_bytes(token) for token in TOKENIZER.encode("€", False)] == [b"\xe2", b"\x82", b"\xac"]
    vocabulary = TOKENIZER.vocabulary
    assert TOKENIZER.token_bytes(vocabulary["<|im_end|>"]) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(len(vocabulary) + 5) == b""
    alphabet = {TOKENIZER.token_bytes(token) for piece, token in vocabulary.items() if len(piece) == 1}
    assert alphabet == {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("step", [decoders.Metaspace(), decoders.Replace("▁", " ")])
def test_bytes_of_sentencepiece_tokens(step):
    vocabulary = {"<unk>": 0, "▁the": 1, "é": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence([step, decoders.ByteFallback(), decoders.Fuse()])
    of = TokenBytes(raw)
    assert b"".join(map(of, [1, 2, 1, 3, 4, 5])).decode() == " theé the€"


@pytest.mark.parametrize(
    ("step", "piece", "added"),
    [(decoders.Replace("▁", " "), "▁the", "▁▁▁"), (decoders.ByteLevel(), "Ġthe", "ĠĠ")],
)
def test_added_tokens_that_are_text_are_decoded_as_text_is(step, piece, added):
    """Gemma's vocabulary has runs of spaces so."""
    raw = RawTokenizer(models.BPE(vocab={piece: 0}, merges=[]))
    raw.decoder = step
    raw.add_tokens([AddedToken(added, normalized=False), "  a"])
    raw.add_special_tokens(["▁end▁"])
    of = TokenBytes(raw)
    assert b"".join(map(of, [0, 1, 0, 2])).decode() == raw.decode([0, 1, 0, 2])
    assert of(3) == "▁end▁".encode()
