"""The channels of the harmony format: the thinking and the answer, however the text arrives."""

import pytest

from offload.constraints.vocabulary import ConstraintVocabulary
from offload.events import Finished, Text, Thought, Tokens
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.thinking import CLOSING, HARMONY, OPENING, Thinking
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.settings.constraint import Constraint
from tests.support.models import SPECIAL, TEMPLATE, make_tokenizer

MARKS, THINK = HARMONY.marks, (OPENING, CLOSING)
ANALYSIS = "<|channel|>analysis<|message|> Four <|en d.\n<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is <|message|> 4. "
TEXTS = [
    (ANALYSIS + FINAL, ("Four <|en d.", "It is <|message|> 4. ")),
    (ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL, ("Four <|en d.\n\nFour <|en d.", "It is <|message|> 4. ")),
    (ANALYSIS + "<|start|>assistant<|chan", ("Four <|en d.", "")),
    ("<|channel|>analysis<|message|>\n\n<|end|>" + FINAL, ("", "It is <|message|> 4. ")),
    ("<|channel|>commentary to=x <|constrain|>json<|message|>{} <|e", ("{} <|e", "")),
    ("It is <|channel|>", ("", "It is <|channel|>")),
    ("<|cha", ("", "<|cha")),
    ("  ", ("", "  ")),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_thinking_and_answer_are_apart_however_the_text_arrives(text, expected):
    for size in range(1, len(text) + 1):
        harmony = Thinking(form=HARMONY)
        parts = [harmony.feed(text[at : at + size]) for at in range(0, len(text), size)]
        parts.append(harmony.flush())
        assert tuple(map("".join, zip(*parts, strict=True))) == expected
        assert not any(thought != thought.rstrip() for thought, _ in parts)


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


@pytest.mark.parametrize(("marks", "begin"), [(MARKS, FINAL.partition("It")[0]), (THINK, "<think></think>")])
def test_blanks_before_a_constrained_answer_are_no_part_of_it(marks, begin):
    tokenizer = tokenizer_with(marks)
    vocabulary = ConstraintVocabulary(lambda: tokenizer, len(tokenizer.vocabulary), [2])
    masks = vocabulary.masks(Constraint("choices", '["yes"]', after_thinking=True), [])
    masks.observe(tokenizer.encode(begin, False))
    allowed = {tokenizer.token_bytes(token) for token in masks.allowed(()).nonzero()[0]}
    assert {each for each in allowed if each.strip()} == {b"y"} and (len(allowed) > 1) == (marks == THINK)
