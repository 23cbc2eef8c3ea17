"""Log-probabilities in answers: OpenAI's forms, and the model's own numbers, streamed or not, whatever runs beside."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload.events import Logprobs, ScoredToken
from tests.support.models import SPECIAL
from tests.support.serving import opened_model, serve_options, serving
from triforce_cli.serve.responses import chat_logprobs, completion_logprobs

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


def assert_are(entries, expected, opened, top):
    """The entries of a chat have the `expected` log-probabilities, and the largest ones beside them."""
    assert len(entries) == len(expected)
    for entry, row, token in zip(entries, expected, ids_of(opened, entries), strict=True):
        assert sorted(entry) == ["bytes", "logprob", "token", "top_logprobs"]
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        likeliest = entry["top_logprobs"]
        assert [each["logprob"] for each in likeliest] == pytest.approx(row.topk(top).values.tolist(), abs=2e-4)
        own = [float(row[each]) for each in ids_of(opened, likeliest)]
        assert [each["logprob"] for each in likeliest] == pytest.approx(own, abs=2e-4)


@pytest.mark.parametrize("method", ["triforce", "auto"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.5}])
def test_a_chats_are_the_models_own_before_temperature(endless, teacher_forced, method, sampling):
    opened = opened_model(endless, method=method, budget=32, chunk=4)
    with serving(opened, opened.model.load(), serve_options()) as served:
        found = served.client.post(CHAT, json=ASKED | sampling | {"logprobs": True, "top_logprobs": 4, "n": 2}).json()
    prompt = opened.model.tokenizer.chat(PROMPT, None)
    for choice in found["choices"]:
        assert sorted(choice["logprobs"]) == ["content", "refusal"] and choice["logprobs"]["refusal"] is None
        entries = choice["logprobs"]["content"]
        assert_are(entries, teacher_forced(prompt, ids_of(opened, entries)), opened, 4)
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
    found = client.post(COMPLETIONS, json=wanted).json()["choices"]
    streamed = events(client.post(COMPLETIONS, json=wanted | {"stream": True}).text)
    tokenizer = opened.model.tokenizer
    for choice, prompt in zip(found, wanted["prompt"], strict=True):
        lists = choice["logprobs"]
        parts = [
            part["logprobs"] for event in streamed for part in event["choices"] if part["index"] == choice["index"]
        ]
        assert lists == {name: [each for part in parts if part for each in part[name]] for name in lists}
        assert sorted(lists) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
        chat = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 10, "temperature": 0}).json()
        assert chat["choices"][0] == choice | {"index": 0, "logprobs": None}
        text = choice["text"]
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert token in SPECIAL or text.startswith(token, offset) or "\ufffd" in text[: offset + 1]
        spelling = {spelt_in_lists(tokenizer.token_bytes(token)): token for token in tokenizer.vocabulary.values()}
        answer = [spelling[token] for token in lists["tokens"]]
        rows = teacher_forced(tokenizer.encode(prompt, True), answer)
        for token, logprob, likeliest, row in zip(
            lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], rows, strict=True
        ):
            assert logprob == pytest.approx(float(row[spelling[token]]), abs=2e-4) and likeliest[token] == logprob
            values = sorted(likeliest.values(), reverse=True)
            assert values[:3] == pytest.approx(row.topk(3).values.tolist(), abs=2e-4) and len(values) in (3, 4)


def spelt_in_lists(data):
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_openais_client_reads_both_forms(api):
    messages = ASKED["messages"]
    more = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    chat = api.chat.completions.create(messages=messages, logprobs=True, **more).choices[0].logprobs
    assert len(chat.content) == 4 and chat.content[0].top_logprobs == [] and chat.content[0].logprob <= 0
    lists = api.completions.create(prompt=PROMPT, logprobs=0, **more).choices[0].logprobs
    assert lists.top_logprobs == [{t: n} for t, n in zip(lists.tokens, lists.token_logprobs, strict=True)]
    stream = api.chat.completions.create(messages=messages, logprobs=True, top_logprobs=1, stream=True, **more)
    scored = [entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.top_logprobs[0].token for entry in scored] == [entry.token for entry in scored]  # it is greedy


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
