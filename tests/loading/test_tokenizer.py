"""Prompts as tokens: the chat template, and documents that spell out control tokens."""

import pytest

from offload.errors import PromptError
from offload.loading.tokenizers.tokenizer import Tokenizer
from tests.support.models import TEMPLATE, make_tokenizer

HF = make_tokenizer()
TOKENIZER = Tokenizer.from_transformers(HF)


def test_added_tokens_in_a_document_stay_text():
    """Also those that are not special: <think> in a text must not begin thinking. Runs of spaces are text anyway."""
    hf = make_tokenizer()
    hf.add_tokens(["<think>", "[TOOL]", "    "])
    tokenizer, document = Tokenizer.from_transformers(hf), "a<think>b[TOOL]c    d"
    think, tool, spaces = hf.convert_tokens_to_ids(["<think>", "[TOOL]", "    "])
    for ids in (tokenizer.chat(document, None), tokenizer.chat("x", document)):
        assert not {think, tool} & set(ids) and spaces in ids
        assert document in tokenizer.decode(ids)
    assert tokenizer.spans(document)[-3:] == [(15, 16), (16, 20), (20, 21)]
    assert {think, tool, spaces} <= set(tokenizer.encode(document, special_tokens=False))  # raw: as the user writes it
    hf.chat_template = TEMPLATE.replace("assistant\n", "assistant\n<think>")
    assert Tokenizer.from_transformers(hf).chat(document, None).count(think) == 1  # the template's own


THINKS = TEMPLATE + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


def thinking_tokenizer(template):
    """A tokenizer whose marks of thinking are tokens, not special ones, as Qwen3's are."""
    hf = make_tokenizer()
    hf.add_tokens(["<think>", "</think>"])
    hf.chat_template = template
    return Tokenizer.from_transformers(hf)


def test_thinking_is_switched_by_the_template():
    tokenizer = thinking_tokenizer(THINKS)
    left, on, off = (tokenizer.chat("Hello", None, think=think) for think in (None, True, False))
    assert left == on and tokenizer.decode(off) == tokenizer.decode(on) + "<think>\n\n</think>\n\n"
    assert not any(tokenizer.thinking(ids).is_open for ids in (left, off))
    opened = thinking_tokenizer(THINKS + "<think>\n")
    assert opened.thinking(opened.chat("Hello", None)).is_open
    assert opened.thinking(opened.encode("no template", True)).is_open is False


@pytest.mark.parametrize("think", [True, False])
def test_a_template_without_a_switch_refuses(think):
    with pytest.raises(PromptError, match=f"--think {'on' if think else 'off'}: .* no switch") as caught:
        TOKENIZER.chat("Hello", None, think=think)
    assert "leave it out" in caught.value.hint
    assert TOKENIZER.thinking(TOKENIZER.chat("<think>", None)) is None  # a text about it, and a model that does not
