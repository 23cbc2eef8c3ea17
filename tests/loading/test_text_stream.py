"""Text as it streams: nothing lost, nothing early, nothing after a stop."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from offload.constraints.vocabulary import ConstraintVocabulary
from offload.events import Finished, Prefilled, Text, Thought, Tokens
from offload.loading.tokenizers.text_stream import StopStrings, StreamDecoder, TextLayer, stream_text
from offload.loading.tokenizers.thinking import CLOSING, FORMATS, HARMONY, OPENING, TAGS, Thinking
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.metrics import Meter
from offload.settings.constraint import Constraint
from tests.support.models import SPECIAL, TEMPLATE, make_tokenizer

HF = make_tokenizer()
TOKENIZER = Tokenizer.from_transformers(HF)
PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)
SENTENCEPIECE_TEXT = st.text(st.sampled_from("ab ▁é€😀漢\n"), max_size=12).filter(lambda text: "▁" not in text)


def streamed(decode, ids):
    decoder = StreamDecoder(decode)
    return [decoder.feed(token) for token in ids] + [decoder.flush()]


@PROPERTY
@given(st.lists(st.integers(0, len(HF) - 1), max_size=40))
def test_any_tokens_stream_to_what_they_decode_to(ids):
    assert "".join(streamed(TOKENIZER.decode, ids)) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("text", ["\ufffd" * 90, "ok " + "\ufffd" * 60 + " end é", "a" + "<|im_end|>" * 300 + "b"])
def test_long_runs_that_never_settle_lose_nothing(text):
    ids = HF(text)["input_ids"]
    assert "".join(streamed(TOKENIZER.decode, ids)) == TOKENIZER.decode(ids)
    broken = HF("é")["input_ids"][:1] * 300
    assert "".join(streamed(TOKENIZER.decode, broken)) == TOKENIZER.decode(broken)


@PROPERTY
@given(st.text(max_size=30))
def test_text_never_shows_a_broken_character(text):
    # Special tokens are no text; hypothesis also tries strings that it finds in the sources.
    assume("\ufffd" not in text and not any(name in text for name in SPECIAL))
    pieces = streamed(TOKENIZER.decode, TOKENIZER.encode(text, special_tokens=False))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def byte_fallback_decode():
    """decode and encode of a sentencepiece-like vocabulary: pieces for a, b and spaces, bytes for the rest."""
    vocab = {piece: i for i, piece in enumerate(["▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)

    def encode(text):
        return [vocab[piece] for piece in raw.encode("▁" + text.replace(" ", "▁")).tokens]

    return raw.decode, encode


@PROPERTY
@given(SENTENCEPIECE_TEXT)
def test_sentencepiece_spaces_and_byte_fallback(text):
    decode, encode = byte_fallback_decode()
    pieces = streamed(decode, encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def watched(text, stops, edges):
    """The text let through, and whether a stop was met, when the text arrives in pieces."""
    watcher, emitted = StopStrings(stops), ""
    for start, end in itertools.pairwise(edges):
        safe, met = watcher.feed(text[start:end])
        emitted += safe
        if met:
            return emitted, True
    return emitted + watcher.flush(), False


@PROPERTY
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_cut_at_the_first_that_completes_however_the_text_arrives(text, stops, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert watched(text, stops, edges) == expected
    assert watched(text, stops, range(len(text) + 1)) == expected


class Source:
    """Engine events that know whether they were closed."""

    def __init__(self, text):
        self.ids = TOKENIZER.encode(text, special_tokens=False)
        self.closed = False

    def events(self, run=1):
        try:
            yield Prefilled(1, 1)
            for start in range(0, len(self.ids), run):
                self.kept = yield Tokens(tuple(self.ids[start : start + run]))
                if self.kept is not None:
                    yield Finished("stop")
                    return
            yield Finished("length")
        finally:
            self.closed = True


@pytest.mark.parametrize("run", [1, 2, 7, 100])
def test_a_stop_string_ends_the_engine(run):
    source = Source("one, two, three, four")
    events = list(stream_text(source.events(run), TextLayer(TOKENIZER.decode, [", th"], None)))
    assert "".join(event.text for event in events if isinstance(event, Text)) == "one, two"
    assert events[-1] == Finished("stop")
    emitted = [token for event in events if isinstance(event, Tokens) for token in event.ids]
    assert TOKENIZER.decode(emitted) == "one, two, th"  # no token behind the one that completes it
    assert source.kept == len(emitted)
    assert source.closed


def test_a_stop_string_in_what_was_held_back_is_the_reason_of_the_end():
    """What may be the beginning of thinking is an answer when no more tokens come."""
    events = list(stream_text(Source("<thi").events(), TextLayer(TOKENIZER.decode, ["hi"], Thinking())))
    assert "".join(event.text for event in events if isinstance(event, Text)) == "<t"
    assert events[-1] == Finished("stop")


THOUGHTS = [
    ("<think>\nLet me see.\n\nYes.\n</think>\n\nIt is 4.", ("Let me see.\n\nYes.", "It is 4.")),
    ("\n<think>\n\n</think>\n\nIt is 4.\n", ("", "It is 4.\n")),
    ("<think>a < b </thin k> </think>c<think>d</think>", ("a < b </thin k>", "c<think>d</think>")),
    (" It is <think>", ("", " It is <think>")),
    ("<think>still at it </thi", ("still at it </thi", "")),
    ("<thi", ("", "<thi")),
    ("  ", ("", "  ")),
]
MARKS, THINK = HARMONY.marks, (OPENING, CLOSING)
ANALYSIS = "<|channel|>analysis<|message|> Four <|en d.\n<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is <|message|> 4. "
HARMONY_TEXTS = [
    (ANALYSIS + FINAL, ("Four <|en d.", "It is <|message|> 4. ")),
    (ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL, ("Four <|en d.\n\nFour <|en d.", "It is <|message|> 4. ")),
    (ANALYSIS + "<|start|>assistant<|chan", ("Four <|en d.", "")),
    ("<|channel|>analysis<|message|>\n\n<|end|>" + FINAL, ("", "It is <|message|> 4. ")),
    (ANALYSIS + FINAL.replace("final", " final <|constrain|>json"), ("Four <|en d.", "It is <|message|> 4. ")),
    ("<|channel|>commentary to=x <|constrain|>json<|message|>{} <|e", ("{} <|e", "")),
    ("It is <|channel|>", ("", "It is <|channel|>")),
    ("<|cha", ("", "<|cha")),
    ("  ", ("", "  ")),
]


COMMAND, GEMMA, MISTRAL = FORMATS[1:4]
OTHERS = [
    (
        COMMAND,
        "<|START_THINKING|>Four.<|END_THINKING|>\n<|START_RESPONSE|>It is 4.<|END_RESPONSE|>",
        ("Four.", "It is 4."),
    ),
    (COMMAND, "<|START_RESPONSE|>It is 4.", ("", "It is 4.")),
    (GEMMA, "<|channel>thought\nFour.\n<channel|>It is 4.", ("Four.", "It is 4.")),
    (GEMMA, "It is 4.", ("", "It is 4.")),
    (MISTRAL, "[THINK]Four.[/THINK]It is [THINK] 4.", ("Four.", "It is [THINK] 4.")),
]


def split(thinking, text, size):
    """Return the thinking and the answer when the text arrives in pieces of a size."""
    parts = [thinking.feed(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(thinking.flush())
    assert not any(thought != thought.rstrip() for thought, _ in parts)  # a line that is left open ends without blanks
    return tuple("".join(part) for part in zip(*parts, strict=True))


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [*((TAGS, *each) for each in THOUGHTS), *((HARMONY, *each) for each in HARMONY_TEXTS), *OTHERS],
)
def test_thinking_and_answer_are_apart_however_the_text_arrives(form, text, expected):
    for size in range(1, len(text) + 1):
        assert split(Thinking(form), text, size) == expected
        if form is TAGS and text.lstrip().startswith(OPENING):  # as where the prompt ends with it
            assert split(Thinking(is_open=True), text.lstrip().removeprefix(OPENING), size) == expected


@pytest.mark.parametrize("run", [1, 7])
@pytest.mark.parametrize("stop", ["4.", "see", "nowhere"])
def test_stop_strings_are_those_of_the_answer(run, stop):
    text = "<think>\nsee 4.\n</think>\n\nIt is 4. I see."
    source, meter = Source(text), Meter(1)
    layer = TextLayer(TOKENIZER.decode, [stop], Thinking())
    events = list(meter.watch(stream_text(source.events(run), layer)))
    answer = "It is 4. I see."
    assert "".join(meter.thoughts) == "see 4."
    assert meter.text == (answer.split(stop)[0] if stop in answer else answer)
    assert events[-1] == Finished("stop" if stop in answer else "length")
    first = next(n for n, event in enumerate(events) if isinstance(event, Text))
    assert all(n < first for n, event in enumerate(events) if isinstance(event, Thought))
    opening, thinking = (TOKENIZER.encode(each, False) for each in ("<think>", "<think>\nsee 4.\n</think>"))
    assert meter.thinking_tokens == len(thinking) - len(opening) + 1  # from the token on that completes <think>
    assert source.closed


def tokenizer_with(marks):
    """Return a tokenizer in whose vocabulary the marks of a template are special tokens."""
    hf = make_tokenizer((*SPECIAL, *marks))
    hf.add_special_tokens({"additional_special_tokens": [*SPECIAL[:2], *marks]})
    hf.chat_template = TEMPLATE + "{# " + "".join(marks) + " #}"
    return Tokenizer.from_transformers(hf)


@pytest.mark.parametrize(
    ("marks", "text", "thought", "answer"),
    [
        (MARKS, ANALYSIS + FINAL, "Four <|en d.", "It is <|message|> 4. "),
        (THINK, "<think>\nFour.</think>\n\nIt is </think> 4.", "Four.", "It is </think> 4."),
        *((form.marks, text, *expected) for form, text, expected in OTHERS),
    ],
)
def test_marks_are_decoded_and_other_special_tokens_are_not(marks, text, thought, answer):
    tokenizer = tokenizer_with(marks)
    ids = tokenizer.encode(text + SPECIAL[2], special_tokens=True)

    def events():
        yield Tokens(ids)
        yield Finished("stop")

    found = list(stream_text(events(), TextLayer.after(tokenizer, [], (), is_chat=True)))
    assert "".join(event.text for event in found if isinstance(event, Thought)) == thought
    assert "".join(event.text for event in found if isinstance(event, Text)) == answer
    assert tokenizer.decoder(())([1, 2, 3]) == tokenizer.decode([1, 2, 3])


@pytest.mark.parametrize(
    ("marks", "begin", "has_gap"),
    [
        (MARKS, FINAL.partition("It")[0], False),
        (MARKS, ANALYSIS + "<|start|>assistant<|channel|>final <|constrain|>json<|message|>", False),
        (THINK, "<think></think>", True),
        (THINK, "", True),
        (("<|user|>", "<|end|>"), "", True),  # of Phi, which does not think
        (("<|end|>", *THINK), "<think></think>", True),
        (COMMAND.marks, "<|START_THINKING|>a<|END_THINKING|>\n<|START_RESPONSE|>", False),
        (GEMMA.marks, "<|channel>thought\na<channel|>", True),
        (MISTRAL.marks, "[THINK]a[/THINK]", True),
    ],
)
def test_a_constraint_binds_what_comes_after_the_thinking(marks, begin, has_gap):
    """Blanks between the two are no part of the answer."""
    tokenizer = tokenizer_with([mark for mark in marks if mark])
    vocabulary = ConstraintVocabulary(lambda: tokenizer, len(tokenizer.vocabulary), [2])
    masks = vocabulary.masks(Constraint("choices", '["yes"]', after_thinking=True), [])
    masks.observe(tokenizer.encode(begin, False))
    allowed = {tokenizer.token_bytes(token) for token in masks.allowed(()).nonzero()[0]} - {OPENING.encode()}
    assert {each for each in allowed if each.strip()} == {b"y"} and (len(allowed) > 1) == (has_gap and bool(begin))
