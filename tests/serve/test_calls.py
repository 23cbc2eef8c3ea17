"""Calls of tools by real token ids: random answers that the masks allow are read as the calls that they are."""

import json
import random

import pytest

from offload.constraints.vocabulary import ConstraintVocabulary
from offload.events import Finished, Text, Tokens
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.tokenizer import Tokenizer
from tests.support.models import SPECIAL, make_tokenizer
from tests.support.tool_templates import TEMPLATES
from triforce_cli.serve.tools import AnsweredCalls, tools_of

NAMES = (*SPECIAL, "[TOOL_CALLS]", "[ARGS]")
EOS = NAMES.index(SPECIAL[2])
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}, "s": {"type": "string", "maxLength": 3}},
    "required": ["n", "s"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("count", "sum-up")]
ENDING = set(b'"}],:')


@pytest.fixture(params=TEMPLATES)
def tokenizer(request):
    hf = make_tokenizer(NAMES)
    hf.add_special_tokens({"additional_special_tokens": list(NAMES)})
    hf.chat_template = TEMPLATES[request.param]
    return Tokenizer.from_transformers(hf)


def answer(tokenizer, choices, choice):
    """Return the tokens of a random answer to a request with tools."""
    wanted = tools_of({"tools": TOOLS, "tool_choice": choice})
    vocabulary = ConstraintVocabulary(lambda: tokenizer, len(tokenizer.vocabulary), [EOS])
    constraint = wanted.constraint(tokenizer.tool_format, tokenizer.special_ids)
    masks, found = vocabulary.masks(constraint, []), []
    while not found or found[-1] != EOS:
        allowed = masks.allowed(()).nonzero()[0].tolist()
        closing = [token for token in allowed if token < len(NAMES) or ENDING.issuperset(tokenizer.token_bytes(token))]
        found.append(choices.choice(closing if closing and choices.random() < 0.5 else allowed))
        masks.observe(found[-1:])
    return found


def streamed(tokenizer, form, ids):
    """Return the text and the calls of an answer that arrives token by token."""

    def events():
        yield from (Tokens((token,)) for token in ids[:-1])
        yield Finished("eos")

    deltas, texts = AnsweredCalls(form), []
    for event in stream_text(events(), TextLayer.after(tokenizer, [], (), True, form)):
        if isinstance(event, Text):
            texts.append(event.text)
    content = "".join(deltas.feed(text)[0] for text in texts) + deltas.flush()
    return content, deltas.calls


def test_a_call_that_is_asked_for_comes(tokenizer):
    for seed in range(4):
        ids = answer(tokenizer, random.Random(seed), "required")
        form = tokenizer.tool_format
        content, calls = streamed(tokenizer, form, ids)
        assert calls and not content.strip()
        for call in calls:
            assert call["function"]["name"] in ("count", "sum-up")
            arguments = json.loads(call["function"]["arguments"])
            assert arguments["n"] in (1, 22) and len(arguments["s"]) <= 3
            assert call["id"].isalnum() and len(call["id"]) == 9 if form.id_length else call["id"].startswith("call_")


def test_an_answer_may_call_or_not(tokenizer):
    found = [answer(tokenizer, random.Random(seed), "auto") for seed in range(6)]
    assert any(streamed(tokenizer, tokenizer.tool_format, ids)[0] for ids in found)
