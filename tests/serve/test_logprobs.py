"""Log-probabilities in answers: OpenAI's forms, and the model's own numbers, streamed or not, whatever runs beside."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload.events import Logprobs, ScoredToken
from tests.support.models import SPECIAL
from tests.support.serving import opened_model, serve_options, serving
from triforce_cli.serve.answer import chat_logprobs, completion_logprobs, token_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "the house of the king, the house of the"
ASKED = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def teacher_forced(endless, opened):
    """Return transformers' log-probabilities `[tokens, vocab]` of an answer's tokens after a prompt's."""
    model = AutoModelForCausalLM.from_pretrained(endless, dtype=torch.float32).eval()

    @torch.inference_mode()
    def score(prompt, answer):
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        return logits.double().log_softmax(-1)

    return score


def ids_of(opened, entries):
    """Return the token ids of entries, by their bytes: of the tiny model's tokens no two have the same."""
    tokenizer = opened.model.tokenizer
    known = {tokenizer.token_bytes(token): token for token in tokenizer.vocabulary.values()}
    return [known[bytes(entry["bytes"])] for entry in entries]


def spelt(entries):
    """Return what the bytes of entries say together, without the special tokens, which no answer shows."""
    shown = [bytes(entry["bytes"]) for entry in entries if entry["token"] not in SPECIAL]
    return b"".join(shown).decode(errors="replace")


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.5}])
def test_a_chats_are_the_models_own_before_temperature(endless, teacher_forced, sampling):
    opened = opened_model(endless, method="triforce", budget=32, chunk=4)
    with serving(opened, opened.model.load(), serve_options()) as served:
        found = served.client.post(CHAT, json=ASKED | sampling | {"logprobs": True, "top_logprobs": 4, "n": 2}).json()
    prompt = opened.model.tokenizer.chat(PROMPT, None)
    for choice in found["choices"]:
        assert sorted(choice["logprobs"]) == ["content", "refusal"] and choice["logprobs"]["refusal"] is None
        entries = choice["logprobs"]["content"]
        for entry, row, token in zip(entries, teacher_forced(prompt, ids := ids_of(opened, entries)), ids, strict=True):
            assert entry["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
            top = [each["logprob"] for each in entry["top_logprobs"]]
            assert top == pytest.approx(row.topk(4).values.tolist(), abs=2e-4)
            assert top == pytest.approx([float(row[each]) for each in ids_of(opened, entry["top_logprobs"])], abs=2e-4)
        assert spelt(entries) == choice["message"]["content"]


@pytest.mark.parametrize("stop", [None, 7])
def test_a_stream_has_those_of_the_whole_answer_with_their_text(client, stop):
    wanted = ASKED | {"logprobs": True, "top_logprobs": 2, "max_tokens": 24, "n": 2, "temperature": 1, "seed": 1}
    whole = client.post(CHAT, json=wanted).json()["choices"]
    if stop is not None:
        wanted |= {"stop": whole[0]["message"]["content"][stop : stop + 2]}
        whole = client.post(CHAT, json=wanted).json()["choices"]
    parts = [
        choice
        for event in events(client.post(CHAT, json=wanted | {"stream": True}).text)
        for choice in event["choices"]
    ]
    for expected in whole:
        own = [part for part in parts if part["index"] == expected["index"]]
        content = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert content == expected["logprobs"]["content"]
        assert "".join(part["delta"].get("content", "") for part in own) == expected["message"]["content"]
        assert all(bool(part["logprobs"]) == bool(part["delta"].get("content")) for part in own[1:])
        answer, found = expected["message"]["content"], spelt(expected["logprobs"]["content"])
        assert found.startswith(answer) and len(found) - len(answer) <= (0 if stop is None else 1)


def test_a_completions_are_lists(client, opened, teacher_forced):
    wanted = {"prompt": [PROMPT, "a€"], "max_tokens": 10, "temperature": 0, "logprobs": 3}
    choices = client.post(COMPLETIONS, json=wanted).json()["choices"]
    parts = [
        part
        for event in events(client.post(COMPLETIONS, json=wanted | {"stream": True}).text)
        for part in event["choices"]
    ]
    tokenizer = opened.model.tokenizer
    ids = {token_text(tokenizer.token_bytes(token), "bytes:"): token for token in tokenizer.vocabulary.values()}
    for choice, prompt in zip(choices, wanted["prompt"], strict=True):
        lists = choice["logprobs"]
        own = [part["logprobs"] for part in parts if part["index"] == choice["index"] and part["logprobs"]]
        assert lists == {name: [value for part in own for value in part[name]] for name in lists}
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert token in SPECIAL or choice["text"].startswith(token, offset) or "\ufffd" in choice["text"]
        rows = teacher_forced(tokenizer.encode(prompt, True), [ids[token] for token in lists["tokens"]])
        for token, logprob, likeliest, row in zip(
            lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], rows, strict=True
        ):
            assert logprob == pytest.approx(float(row[ids[token]]), abs=2e-4) and likeliest[token] == logprob
            values = sorted(likeliest.values(), reverse=True)
            assert values[:3] == pytest.approx(row.topk(3).values.tolist(), abs=2e-4) and len(values) in (3, 4)


def test_numbers_that_json_has_not_and_tokens_that_are_spelt_alike():
    spelling = {1: b"a", 2: b"a", 3: b"\xe2\x82"}.__getitem__
    never = float("-inf")
    token = ScoredToken(3, 5, Logprobs(never, ((1, -0.5), (2, -1.0))))
    assert completion_logprobs([token], spelling) == {
        "text_offset": [5],
        "token_logprobs": [-9999.0],
        "tokens": ["bytes:\\xe2\\x82"],
        "top_logprobs": [{"a": -0.5, "bytes:\\xe2\\x82": -9999.0}],
    }
    (entry,) = chat_logprobs([token], spelling)["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("\\xe2\\x82", -9999.0, [0xE2, 0x82])
    assert [each["token"] for each in entry["top_logprobs"]] == ["a", "a"]
