"""The channels of the harmony format: the thinking and the answer, however the text arrives."""

import pytest

from offload.events import Finished, Text, Thought, Tokens
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.thinking import MARKS, Harmony
from offload.loading.tokenizers.tokenizer import Tokenizer
from tests.support.models import SPECIAL, TEMPLATE, make_tokenizer

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
        harmony = Harmony()
        parts = [harmony.feed(text[at : at + size]) for at in range(0, len(text), size)]
        parts.append(harmony.flush())
        assert tuple(map("".join, zip(*parts, strict=True))) == expected
        assert not any(thought != thought.rstrip() for thought, _ in parts)


def test_marks_are_decoded_and_other_special_tokens_are_not():
    hf = make_tokenizer((*SPECIAL, *MARKS))
    hf.add_special_tokens({"additional_special_tokens": [*SPECIAL[:2], *MARKS]})
    hf.chat_template = TEMPLATE + "{# <|channel|> #}"
    tokenizer = Tokenizer.from_transformers(hf)
    ids = tokenizer.encode(ANALYSIS + FINAL + SPECIAL[2], special_tokens=True)
    thinking = tokenizer.thinking([])
    layer = TextLayer(tokenizer.decoder(thinking.marks), [], thinking)

    def events():
        yield Tokens(ids)
        yield Finished("stop")

    found = list(stream_text(events(), layer))
    assert "".join(event.text for event in found if isinstance(event, Thought)) == "Four <|en d."
    assert "".join(event.text for event in found if isinstance(event, Text)) == "It is <|message|> 4. "
    assert tokenizer.decoder(())([1, 2, 3]) == tokenizer.decode([1, 2, 3])
